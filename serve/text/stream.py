"""One sequence's tokens as text: detokenizer, then stop strings. Parsers of reasoning or tool calls go behind this."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from serve.text.detokenizer import Detokenizer
from serve.text.stop import StopMatcher


class TextStream:
    """Feeds each output token through; `stop_reason` is the stop string once one was completed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._stop = StopMatcher(stop)

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stop.matched

    def push(self, token_id: int) -> str:
        """Text that is ready to be shown after this token."""
        return self._stop.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Text that was held back for a stop string that did not come."""
        return self._stop.flush()
