"""What a process was really told: its command line and environment, read back.

Plans and checks read this and not the recipe, so that they judge what will be started, whoever derived it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from configs.job import ProcessSpec


class Arguments:
    """Flags of one process. Spellings may be given as alternatives; of one, the last occurrence counts."""

    def __init__(self, process: ProcessSpec) -> None:
        self.name = process.name
        self.env: Mapping[str, str] = process.env
        self._values: dict[str, str | None] = {}
        following = iter((*process.argv[1:], None))
        for part in process.argv:
            name, equals, value = part.partition("=")
            after = next(following)
            if not name.startswith("-"):
                continue
            told = value if equals else after if after is not None and not after.startswith("--") else None
            self._values[name] = told if told is not None else self._values.get(name)

    def has(self, *flags: str) -> bool:
        """Whether a flag is there, with a value or without."""
        return any(flag in self._values for flag in flags)

    def text(self, *flags: str) -> str | None:
        """The value after ``--flag`` or ``--flag=``; None when it is absent or has none."""
        return next((value for flag in flags if (value := self._values.get(flag)) is not None), None)

    def number(self, *flags: str) -> float | None:
        """The value as a number; None when it is absent or no number."""
        return _number(self.text(*flags))

    def integer(self, *flags: str) -> int | None:
        """The value as a whole number; None when it is absent or none."""
        number = self.number(*flags)
        return None if number is None or number != int(number) else int(number)

    def variable(self, *names: str) -> int | None:
        """A variable of the environment as a whole number; None when it is absent or none."""
        for name in names:
            number = _number(self.env.get(name))
            if number is not None and number == int(number):
                return int(number)
        return None

    def document(self, flag: str) -> dict[str, Any]:
        """A flag whose value is a JSON object, with ``--flag.key value`` merged in; empty when there is none."""
        text = self.text(flag)
        try:
            loaded = json.loads(text) if text else {}
        except ValueError:
            loaded = {}
        found: dict[str, Any] = loaded if isinstance(loaded, dict) else {}
        for name, value in self._values.items():
            if name.startswith(f"{flag}."):
                found[name.removeprefix(f"{flag}.")] = value
        return found

    @property
    def draft_depth(self) -> int:
        """Draft tokens per step that this process was told, whatever its engine calls it; 0 is none."""
        config = self.document("--speculative-config")
        depth = _number(str(config.get("num_speculative_tokens", "")))
        if depth is None:
            depth = self.number("--num-mtp", "--speculative-num-steps", "--draft-depth")
        if depth is None:
            depth = _number(self.env.get("GLM52_MTP_DRAFTS"))
        return 0 if depth is None else int(depth)


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
