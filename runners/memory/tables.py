"""A memory plan: one table a device, one row a term, every row with its formula and where the formula comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

GIB = 1 << 30
Kind = Literal["weights", "kv", "handoff", "workspace", "conversion", "offload", "reserve", "runtime"]


def gib(value: float) -> float:
    """Bytes -> GiB."""
    return value / GIB


@dataclass(frozen=True)
class Term:
    """One use of memory. ``change`` says what makes it smaller; empty when nothing in a recipe does."""

    name: str
    bytes: int
    formula: str
    source: str
    kind: Kind
    change: str = ""


@dataclass(frozen=True)
class Budget:
    """A share of a device that an engine gives itself: what it needs there against what it will find."""

    name: str
    needed_bytes: int
    available_bytes: int
    formula: str
    change: str

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes


@dataclass(frozen=True)
class Table:
    """One device. ``resident`` is held from the start, ``peak`` comes on top while a prompt is taken over.

    ``taken_bytes``, where given, is what an engine takes whatever it needs (a share of the device); terms named in
    ``inside`` are part of it."""

    process: str
    ranks: str
    device: str
    capacity_bytes: int
    resident: tuple[Term, ...]
    peak: tuple[Term, ...] = ()
    budgets: tuple[Budget, ...] = ()
    taken_bytes: int = 0
    inside: tuple[str, ...] = ()
    longest_convertible: int | None = None

    @property
    def resident_bytes(self) -> int:
        """What is held once the process serves."""
        inside = sum(term.bytes for term in self.resident if term.name in self.inside)
        outside = sum(term.bytes for term in self.resident if term.name not in self.inside)
        return max(inside, self.taken_bytes) + outside

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once."""
        return self.resident_bytes + sum(term.bytes for term in self.peak)

    @property
    def slack_bytes(self) -> int:
        """What the device has left at the peak; negative when it does not fit."""
        return self.capacity_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        return self.slack_bytes >= 0 and all(budget.fits for budget in self.budgets)

    @property
    def largest_changeable(self) -> Term | None:
        """The largest term that a recipe can make smaller."""
        terms = [term for term in (*self.resident, *self.peak) if term.change]
        return max(terms, key=lambda term: term.bytes, default=None)

    def lines(self) -> Iterator[str]:
        """Rows for people: GiB, name, formula, source."""
        verdict = "fits" if self.fits else "DOES NOT FIT"
        yield f"{self.process}, {self.ranks}, {self.device} ({gib(self.capacity_bytes):.2f} GiB): {verdict}"
        for term in self.resident:
            yield _row(gib(term.bytes), term.name, f"{term.formula}  [{term.source}]")
        if self.taken_bytes:
            yield _row(gib(self.taken_bytes), "taken by the engine", f"holds {', '.join(self.inside)}")
        yield _row(gib(self.resident_bytes), "resident", "")
        for term in self.peak:
            yield _row(gib(term.bytes), f"peak: {term.name}", f"{term.formula}  [{term.source}]")
        if self.peak:
            yield _row(gib(self.peak_bytes), "at the peak", "")
        for budget in self.budgets:
            sign = "fits" if budget.fits else "DOES NOT FIT"
            yield (
                f"  {budget.name}: {gib(budget.needed_bytes):.2f} GiB needed, "
                f"{gib(budget.available_bytes):.2f} GiB available ({budget.formula}): {sign}"
            )
        yield _row(gib(self.slack_bytes), "slack", "")

    def to_json(self) -> dict[str, Any]:
        """The table as data, in bytes."""
        return {
            "process": self.process,
            "ranks": self.ranks,
            "device": self.device,
            "capacity-bytes": self.capacity_bytes,
            "terms": [_term_json(term, "resident") for term in self.resident]
            + [_term_json(term, "peak") for term in self.peak],
            "taken-bytes": self.taken_bytes,
            "resident-bytes": self.resident_bytes,
            "peak-bytes": self.peak_bytes,
            "slack-bytes": self.slack_bytes,
            "budgets": [
                {"name": budget.name, "needed-bytes": budget.needed_bytes, "available-bytes": budget.available_bytes}
                for budget in self.budgets
            ],
            "fits": self.fits,
        }


def _row(value_gib: float, name: str, detail: str) -> str:
    return f"  {value_gib:>9.2f} GiB  {name:<28} {detail}".rstrip()


def _term_json(term: Term, when: str) -> dict[str, Any]:
    return {
        "name": term.name,
        "bytes": term.bytes,
        "kind": term.kind,
        "when": when,
        "formula": term.formula,
        "source": term.source,
    }
