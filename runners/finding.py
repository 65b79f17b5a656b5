"""Finding: one thing that is, or would go, wrong, in words that suffice to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
Phase = Literal["static", "login", "allocation", "runtime"]


@dataclass(frozen=True)
class Finding:
    """An error stops a sweep, a warning is printed. ``where`` is file:line of the YAML, or a node and a role."""

    code: str
    severity: Severity
    where: str
    message: str
    fix: str
    phase: Phase = "static"

    def __str__(self) -> str:
        return f"{self.severity}: {self.code}: {self.where}: {self.message}\n  fix: {self.fix}"
