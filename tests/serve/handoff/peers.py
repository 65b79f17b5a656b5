"""The other process of the two-process tests: a real receiver or sender that is driven by lines of JSON.

Run as a module it reads one command a line on stdin and answers one line on stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import xxhash

from serve.handoff.layout import KVLayout
from serve.handoff.protocol import HandoffError
from serve.handoff.receiver import HandoffReceiver
from serve.handoff.sender import HandoffSender
from serve.handoff.transport import create_transport
from tests.serve.handoff.layouts import LLAMA_CONFIG, rows

LAYOUT = KVLayout.from_config(LLAMA_CONFIG, "float32")
REPOSITORY = Path(__file__).parents[3]


class Peer:
    """A child process; every answer has a deadline."""

    def __init__(self, role: str, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.handoff.peers", role, json.dumps(options)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self.hello = self._answer(30.0)

    def ask(self, timeout_s: float = 20.0, **command: Any) -> Any:
        """One command and its answer."""
        self._stdin.write(json.dumps(command).encode() + b"\n")
        self._stdin.flush()
        return self._answer(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP, SIGCONT or SIGKILL."""
        os.kill(self._process.pid, number)

    def close(self) -> None:
        """Kills and reaps; idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        self._selector.close()
        self._stdin.close()
        self._stdout.close()

    def _answer(self, timeout_s: float) -> Any:
        if not self._selector.select(timeout_s):
            raise TimeoutError(f"the peer gave no answer within {timeout_s} s")
        line = self._stdout.readline()
        if not line:
            raise EOFError(f"the peer ended with status {self._process.wait(5)}")
        return json.loads(line)


async def receiver(options: dict[str, Any]) -> None:
    """Commands: take (hash of every plane-layer, or the error), stats, peek (bytes of the pool that are not 0)."""
    transport = create_transport("mooncake", "127.0.0.1", "tcp")
    decode = HandoffReceiver(LAYOUT, transport, host="127.0.0.1", control_port=0, **options)
    await decode.start()
    say({"control": decode.control_address})
    async for command in commands():
        if command["do"] == "take":
            try:
                slot = await decode.take(command["handoff_id"], deadline_s=command["deadline_s"])
            except HandoffError as error:
                say({"code": error.code, "message": error.message})
                continue
            say({f"{p.name}/{n}": xxhash.xxh3_64_hexdigest(slot.array(p.name, n).data) for p, n in LAYOUT.blocks()})
            slot.release()
        elif command["do"] == "stats":
            say(decode.stats())
        elif command["do"] == "peek":
            assert decode._arena is not None
            say(int((decode._arena.bytes != 0).sum()))


async def sender(options: dict[str, Any]) -> None:
    """Commands: open and stage all plane-layers but the last, so that the hand-off stays unfinished."""
    prefill = HandoffSender(LAYOUT, create_transport("mooncake", "127.0.0.1", "tcp"), staging_bytes=64 << 20)
    say({})
    async for command in commands():
        prefill.open(command["handoff_id"], "r", options["control"], command["tokens"], 60.0)
        for (plane, layer), data in list(rows(LAYOUT, command["tokens"]).items())[:-1]:
            prefill.stage(command["handoff_id"], plane, layer, 0, data)
        say({})


async def commands() -> Any:
    """Lines of stdin as JSON, read off the event loop."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield json.loads(line)


def say(answer: Any) -> None:
    """One line on stdout."""
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run({"receiver": receiver, "sender": sender}[sys.argv[1]](json.loads(sys.argv[2])))
    os._exit(0)
