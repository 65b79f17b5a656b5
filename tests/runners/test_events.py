"""The event file has one writer and a patient reader; people and programs are shown the same events."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
from pathlib import Path

import pytest

from runners.events import Event, EventLog, EventReader
from runners.progress import JsonProgress, LiveProgress, PlainProgress

EVENTS: list[Event] = [
    {"event": "launch", "what": "run", "name": "r", "jobs": 1, "points": 1, "folder": "/r"},
    {"event": "stage", "job": "j", "name": "ready", "state": "started"},
    {"event": "stage", "job": "j", "name": "ready", "state": "progress", "process": "decode-0"},
    {"event": "stage", "job": "j", "name": "ready", "state": "done", "elapsed_s": 1.25},
    {"event": "point", "job": "j", "id": "p", "state": "started"},
    {"event": "point", "job": "j", "id": "p", "state": "progress", "done": 3, "total": 10},
    {"event": "point", "job": "j", "id": "p", "state": "done", "status": "produced", "valid": False, "message": "why"},
    {"event": "done", "what": "run", "name": "r", "status": 1, "message": "0 of 1 points valid", "elapsed_s": 2.0},
]


def test_second_writer_is_refused(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl"), pytest.raises(BlockingIOError):
        EventLog(tmp_path / "events.jsonl")
    EventLog(tmp_path / "events.jsonl").close()


def test_file_system_without_locks_is_no_reason_not_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)  # Lustre without -o flock
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("done", what="run")
    assert [event["what"] for event in EventReader(tmp_path / "events.jsonl").new()] == ["run"]


def test_reader_waits_for_whole_lines_and_never_repeats(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert list(reader.new()) == []
    path.write_bytes(b'{"event":"launch"}\n{"event":"sta')
    assert list(reader.new()) == [{"event": "launch"}]
    with path.open("ab") as file:
        file.write(b'ge"}\nnot json\n{"event":"done"}\n')
    assert list(reader.new()) == [{"event": "stage"}, {"event": "done"}]
    assert list(reader.new()) == []


def test_plain_lines_tell_the_story() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    for event in EVENTS:
        progress.event(event)
    lines = [line.partition(" s  ")[2] for line in stream.getvalue().splitlines()]
    assert lines == [
        "run r: 1 job(s), 1 point(s) in /r",
        "j: ready ...",
        "j: decode-0 is ready",
        "j: ready done (1.2 s)",
        "j: point p ...",
        "j: point p INVALID: why",
        "run r: 0 of 1 points valid (2.0 s)",
    ]


def test_json_records_are_the_events_and_people_read_elsewhere() -> None:
    records, human = io.StringIO(), io.StringIO()
    progress = JsonProgress(records, PlainProgress(human))
    for event in EVENTS:
        progress.event(event)
    progress.note("a note")
    assert [json.loads(line) for line in records.getvalue().splitlines()] == EVENTS
    assert "a note" in human.getvalue()


@pytest.mark.parametrize("no_color", [False, True])
def test_terminal_shows_stages_points_and_their_progress(no_color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1") if no_color else monkeypatch.delenv("NO_COLOR", raising=False)
    main, side = pty.openpty()
    with os.fdopen(side, "w") as stream:
        progress = LiveProgress(stream)
        for event in EVENTS:
            progress.event(event)
            progress.refresh()
        progress.close()
        shown = os.read(main, 1 << 16).decode()
    os.close(main)
    for text in ("decode-0 is ready", "point p", "3/10", "INVALID: why", "0 of 1 points valid"):
        assert text in shown
    assert ("\x1b[38;" in shown or "\x1b[3" in shown) is not no_color
