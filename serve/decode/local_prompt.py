"""Prompts tokenised here, for a server that also prefills (--allow-local-prefill).

transformers is imported by the first chat: it takes longer to import than everything else, and text needs it not.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from serve.openai import GenerationRequest, RequestError

_RESERVED = frozenset(
    {"messages", "conversation", "tokenize", "chat_template", "return_tensors", "return_dict", "tools"}
)


class LocalPrompt:
    """Text with the model's tokenizer, chat with its template (rendered in transformers' sandbox)."""

    def __init__(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        self._model_dir = model_dir
        self._tokenizer = tokenizer

    async def token_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        """The prompt's token ids. Raises RequestError for a prompt that cannot be rendered or is empty."""
        if isinstance(request.prompt, tuple):
            return request.prompt
        token_ids = await asyncio.to_thread(self._encode, request)
        if not token_ids:
            raise RequestError("the prompt has no tokens", param="prompt")
        return tuple(token_ids)

    @cached_property
    def _template(self) -> Any:
        # Not AutoTokenizer, which imports scipy and scikit-learn too, 4 s on a core: only the template is wanted of it.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(self._model_dir, local_files_only=True)

    def _encode(self, request: GenerationRequest) -> list[int]:
        if request.prompt is not None:
            return list(self._tokenizer.encode(str(request.prompt)).ids)
        if reserved := _RESERVED & request.chat_template_kwargs.keys():
            raise RequestError(f"chat_template_kwargs must not set {min(reserved)}", param="chat_template_kwargs")
        options = {"add_generation_prompt": True, **request.chat_template_kwargs}
        template = self._template
        try:
            text = template.apply_chat_template(list(request.messages or ()), tokenize=False, **options)
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        except Exception as error:
            # The template is the model's and the messages are the client's: whatever it raises is about them.
            message = f"the model's chat template refuses these messages: {error}"
            raise RequestError(message, param="messages", code="template_error") from None
