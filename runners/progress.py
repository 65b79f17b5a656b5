"""Shows a run while it goes: live in a terminal, plain lines elsewhere, records with --json."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from runners.events import Event

if TYPE_CHECKING:
    from rich.progress import TaskID


class Progress(Protocol):
    """Consumes the events of a run, in order."""

    def event(self, event: Event) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def create_progress(*, json_records: bool, stream: TextIO = sys.stderr) -> Progress:
    """Live when ``stream`` is a terminal, else plain lines on it; with ``json_records`` also records on stdout."""
    human: Progress = LiveProgress(stream) if stream.isatty() else PlainProgress(stream)
    return JsonProgress(sys.stdout, human) if json_records else human


def describe(event: Event) -> str | None:
    """One line about an event for people, or None when it is not worth one."""
    job = event.get("job", "")
    took = f" ({event['elapsed_s']:.1f} s)" if event.get("elapsed_s") is not None else ""
    match event["event"], event.get("state") or event.get("what"):
        case "launch", "run":
            return f"run {event['name']}: {event['jobs']} job(s), {event['points']} point(s) in {event['folder']}"
        case "launch", "job":
            return f"{event['name']}: submitted"
        case "launch", "process":
            ports = ", ".join(f"{name} {port}" for name, port in event.get("ports", {}).items())
            return f"{job}: {event['name']} started (pid {event['pid']}; {ports})"
        case "stage", "started":
            return f"{job}: {event['name']} ..."
        case "stage", "progress":
            return f"{job}: {event['process']} is ready"
        case "stage", "done":
            return f"{job}: {event['name']} done{took}" + (f": {event['message']}" if event.get("message") else "")
        case "stage", "failed":
            return f"{job}: {event['name']} failed{took}: {event.get('message') or 'cut short'}"
        case "point", "started":
            return f"{job}: point {event['id']} ..."
        case "point", "done":
            return f"{job}: point {event['id']} {point_word(event)}{took}"
        case "done", "job":
            return f"{job}: {event['outcome']} ({event['code']}){took}: {event['message']}"
        case "done", "run":
            return f"run {event['name']}: {event['message']}{took}"
    return None


def point_word(event: Event) -> str:
    """valid, INVALID with the reasons, or what became of it instead."""
    if event["status"] != "produced":
        return f"{event['status'].upper()}: {event.get('message', '')}"
    return "valid" if event["valid"] else f"INVALID: {event.get('message', '')}"


class PlainProgress:
    """One line an event, with the seconds since the start in front."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = time.monotonic()

    def event(self, event: Event) -> None:
        if line := describe(event):
            self.note(line)

    def note(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:7.1f} s  {text}", file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class LiveProgress:
    """A rich display: finished stages scroll by, the running one and every point have a bar and a clock."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._display = RichProgress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=stream, highlight=False),
        )
        self._tasks: dict[tuple[str, str, str], TaskID] = {}
        self._display.start()

    def event(self, event: Event) -> None:
        state, kind = event.get("state"), event["event"]
        key = (kind, event.get("job", ""), event.get("id") or event.get("name", ""))
        if kind in ("stage", "point") and state == "started":
            self._tasks[key] = self._display.add_task(f"{kind} {key[2]}", total=None if kind == "point" else 1)
            return
        if key in self._tasks and state == "progress" and "done" in event:
            self._display.update(self._tasks[key], completed=event["done"], total=event["total"])
            return
        if key in self._tasks and state in ("done", "failed"):
            self._display.remove_task(self._tasks.pop(key))
        if line := describe(event):
            self.note(line)

    def note(self, text: str) -> None:
        self._display.console.print(text, markup=False)

    def refresh(self) -> None:
        """Draws now instead of at the next tick."""
        self._display.refresh()

    def close(self) -> None:
        for task in self._tasks.values():
            self._display.remove_task(task)
        self._tasks.clear()
        self._display.stop()


class JsonProgress:
    """Records on ``records``, one JSON object a line; people read ``human``."""

    def __init__(self, records: TextIO, human: Progress) -> None:
        self._records = records
        self._human = human

    def event(self, event: Event) -> None:
        print(dumps(event), file=self._records, flush=True)
        self._human.event(event)

    def note(self, text: str) -> None:
        self._human.note(text)

    def close(self) -> None:
        self._human.close()


def dumps(record: Any) -> str:
    """One line of JSON."""
    return json.dumps(record, separators=(",", ":"), default=str)
