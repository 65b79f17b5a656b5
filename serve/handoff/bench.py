"""How fast the hand-off is, beside the bare transport under it, between the same two processes in the same run.

    python -m serve.handoff.bench --mib 64

A round is one hand-off (stage every plane-layer, write, commit, verify, take), one of a session's turn whose first nine
tenths decode holds, and one bare ``transfer_sync_write`` of as many bytes as the first; rounds alternate, so that all
meet the same machine. Prints one JSON object; rates are GiB/s of the median round. ``bare_polled`` is the bare write as
the transport here does it (submit and poll): the engine's own blocking call spins a core, which costs it speed on a
machine with few of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from serve.handoff.arena import Arena
from serve.handoff.layout import KVLayout, Plane
from serve.handoff.mooncake import MooncakeTransport
from serve.handoff.prefix import digest_chain
from serve.handoff.protocol import Prefix
from serve.handoff.receiver import HandoffReceiver
from serve.handoff.sender import HandoffSender

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
GIB = 1 << 30


def smollm2_layout() -> KVLayout:
    """SmolLM2-135M's: 30 layers of k and v, rows (3, 64) float32, 46,080 bytes a token."""
    layers = tuple(range(30))
    return KVLayout("bench", 49152, "neox", tuple(Plane(name, layers, (3, 64), "float32") for name in ("k", "v")))


async def receive(nbytes: int, held_tokens: int) -> None:
    """The other process: takes each hand-off named on stdin and answers when it is verified."""
    transport = MooncakeTransport("tcp")
    receiver = HandoffReceiver(
        smollm2_layout(),
        transport,
        host=HOST,
        control_port=0,
        pool_bytes=3 * nbytes,
        quarantine_s=TIMEOUT_S,
        max_slots=4,
        held_prefix_tokens=held_tokens,
    )
    await receiver.start()
    bare = Arena(nbytes)
    transport.register(bare.address, nbytes)
    print(json.dumps([receiver.control_address, transport.session, bare.address]), flush=True)
    while handoff_id := (await asyncio.to_thread(sys.stdin.readline)).strip():
        slot = await receiver.take(handoff_id, deadline_s=TIMEOUT_S)
        slot.release()
        print(json.dumps(slot.timings), flush=True)
    await receiver.close()


def measure(mib: int, rounds: int) -> dict[str, Any]:
    """Runs the rounds and returns what is printed. Raises RuntimeError when a bare write fails."""
    layout = smollm2_layout()
    tokens = (mib << 20) // layout.payload_bytes(1)
    nbytes = layout.slot_bytes(tokens)
    transport = MooncakeTransport("tcp")
    transport.start(HOST)
    # Two: the staging of a hand-off is free a little after the receiver has it.
    sender = HandoffSender(layout, transport, staging_bytes=2 * nbytes)
    bare = Arena(nbytes)
    transport.register(bare.address, nbytes)
    random = np.random.default_rng(0)
    rows = {
        (plane.name, layer): random.integers(0, 256, (tokens, plane.row_bytes), dtype=np.uint8)
        for plane, layer in layout.blocks()
    }
    measured: list[dict[str, float]] = []
    command = [sys.executable, "-m", "serve.handoff.bench", "--receive", str(nbytes), str(tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        try:
            assert peer.stdin is not None and peer.stdout is not None
            control, session, remote = json.loads(peer.stdout.readline())

            def hand_off(handoff_id: str, prefix: Prefix | None) -> tuple[float, dict[str, float]]:
                """When everything was staged, and the receiver's timings."""
                assert peer.stdin is not None and peer.stdout is not None
                peer.stdin.write(handoff_id + "\n")
                peer.stdin.flush()
                sender.open(handoff_id, handoff_id, control, tokens, TIMEOUT_S, prefix=prefix)
                for (plane, layer), data in rows.items():
                    sender.stage(handoff_id, plane, layer, 0, data)
                staged = time.perf_counter()
                sender.finish(handoff_id)
                return staged, json.loads(peer.stdout.readline())

            for round_ in range(rounds + 1):
                turn = [*range(tokens * 9 // 10), *[-round_ - 1] * (tokens - tokens * 9 // 10)]
                prefix = Prefix(session="bench", digests=digest_chain(turn))
                turned = time.perf_counter()
                hand_off(f"turn-{round_}", prefix)
                started = time.perf_counter()
                staged, timings = hand_off(f"bench-{round_}", None)
                taken = time.perf_counter()
                if transport.engine.transfer_sync_write(session, bare.address, remote, nbytes) != 0:
                    raise RuntimeError(f"the bare write of {nbytes} bytes to {session} failed")
                written = time.perf_counter()
                transport.write(session, [(bare.address, remote, nbytes)], TIMEOUT_S)
                polled = time.perf_counter()
                measured.append(
                    {
                        "handoff_s": taken - started,
                        "turn_s": started - turned,
                        "bare_s": written - taken,
                        "polled_s": polled - written,
                        "stage_ms": (staged - started) * 1e3,
                        "wire_ms": timings["wire_ms"],
                        "writes": timings["writes"],
                        "verify_ms": timings["verify_ms"],
                    }
                )
            peer.stdin.write("\n")
            peer.stdin.flush()
            peer.wait(TIMEOUT_S)
        finally:
            peer.kill()
    sender.close()
    transport.close()
    # The first round opens the sessions.
    median = {key: statistics.median(round_[key] for round_ in measured[1:]) for key in measured[0]}
    handoff, sync, polled_rate = (nbytes / median[key] / GIB for key in ("handoff_s", "bare_s", "polled_s"))
    return {
        "bytes": nbytes,
        "tokens": tokens,
        "rounds": rounds,
        "handoff_gib_s": round(handoff, 3),
        "bare_gib_s": round(sync, 3),
        "ratio": round(handoff / sync, 3),
        "turn_ratio": round(median["turn_s"] / median["handoff_s"], 3),
        "bare_polled_gib_s": round(polled_rate, 3),
        "ratio_to_polled": round(handoff / polled_rate, 3),
        **{key: round(median[key], 3) for key in ("stage_ms", "wire_ms", "writes", "verify_ms")},
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m serve.handoff.bench", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mib", type=int, default=64, help="MiB of one hand-off")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count, after one that does not")
    parser.add_argument("--receive", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        asyncio.run(receive(*options.receive))
        return
    if options.mib < 1 or options.rounds < 1:
        parser.error("--mib and --rounds must be at least 1")
    print(json.dumps(measure(options.mib, options.rounds)))


if __name__ == "__main__":
    main()
