"""The decode side of the hand-off: owns the pool, answers the control connections, hands verified slots out."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from serve.handoff.arena import Arena
from serve.handoff.held import HeldPrefix, HeldPrefixes
from serve.handoff.layout import KVLayout
from serve.handoff.listener import ControlListener
from serve.handoff.pool import BufferPool
from serve.handoff.protocol import (
    MAX_DEADLINE_S,
    Abort,
    Aborted,
    Commit,
    Committed,
    HandoffCode,
    HandoffError,
    Reply,
    Request,
    Reserve,
    Reserved,
)
from serve.handoff.slots import Slot, SlotTable
from serve.handoff.transport import Transport

log = logging.getLogger(__name__)

# Hashing keeps one core at the speed of its memory; decode servers that share a node leave each other some.
VERIFY_THREADS = min(8, max(2, len(os.sched_getaffinity(0)) // 8))

T = TypeVar("T")


class ReceivedSlot:
    """A verified slot on loan: valid until release(). ``timings`` are milliseconds by stage name.

    ``timings`` holds wait_commit_ms and verify_ms of this side, and what the sender put into its commit.
    """

    def __init__(self, receiver: HandoffReceiver, slot: Slot, timings: dict[str, float]) -> None:
        self.handoff_id = slot.handoff_id
        self.request_id = slot.request_id
        self.tokens = slot.tokens
        self.layout = receiver.layout
        self.held_tokens = slot.held_tokens
        self.draft_token_ids = slot.draft_token_ids
        self.timings = timings
        self._receiver = receiver
        self._slot = slot
        self._offsets = receiver.layout.offsets(slot.tokens)
        self._released = False

    @property
    def received_bytes(self) -> int:
        """Payload that came over the wire for this slot."""
        return self.layout.payload_bytes(self.tokens) - self.saved_bytes

    @property
    def saved_bytes(self) -> int:
        """Payload that did not: rows that were held here from an earlier turn."""
        return self.layout.payload_bytes(self.held_tokens)

    def array(self, plane: str, layer: int) -> npt.NDArray[np.uint8]:
        """The plane-layer's bytes, [block_bytes] uint8, a view into the pool.

        Raises KeyError for a plane-layer that the layout has not, RuntimeError after release().
        """
        if self._released:
            raise RuntimeError(f"slot of {self.handoff_id} was released")
        return self._receiver.block(self._slot, self._offsets[plane, layer], plane)

    def release(self) -> None:
        """Gives the slot back; idempotent, on the receiver's event loop. No view of it may be used afterwards.

        The rows of a session's prompt stay here for its next turn, as long as there is room for them.
        """
        if not self._released:
            self._released = True
            self._receiver.release(self._slot)


class HandoffReceiver:
    """Receives hand-offs of one layout; lives on one asyncio event loop.

    ``control_port`` 0 picks a free port. ``quarantine_s`` is how long a slot whose writer was not heard of again is
    kept from reuse: choose it above the transport's own progress timeout (Mooncake TCP: 30 s). The rows of at most
    ``held_prefix_tokens`` tokens of earlier prompts stay in the pool for the next turn of their session. ``device`` is
    where slots are copied to: the pool is page-locked for a GPU.
    """

    def __init__(
        self,
        layout: KVLayout,
        transport: Transport,
        *,
        host: str,
        control_port: int,
        pool_bytes: int,
        quarantine_s: float,
        max_slots: int,
        held_prefix_tokens: int = 0,
        device: str = "cpu",
    ) -> None:
        self.layout = layout
        self._transport = transport
        self._device = device
        self._table = SlotTable(
            layout,
            BufferPool(pool_bytes),
            max_slots=max_slots,
            quarantine_s=quarantine_s,
            held_prefix_tokens=held_prefix_tokens,
        )
        self._pool_bytes = pool_bytes
        self._arena: Arena | None = None
        self._host = host
        self._listener = ControlListener(host, control_port, self._answer, self._writer_closed)
        self._waiting: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()
        self._sweeper: asyncio.Task[None] | None = None
        self._completing: set[asyncio.Task[None]] = set()
        self._copying: dict[int, asyncio.Task[None]] = {}
        self._verifiers = ThreadPoolExecutor(VERIFY_THREADS, thread_name_prefix="handoff-verify")
        self._closed = False

    @property
    def control_address(self) -> str:
        """``host:port`` of the control listener. Only after start()."""
        return self._listener.address

    @property
    def held(self) -> HeldPrefixes:
        """The rows of earlier prompts that are still here."""
        return self._table.held

    async def start(self) -> None:
        """Registers the pool and listens. Raises OSError (port taken) and HandoffError (transport)."""
        self._transport.start(self._host)
        await self._listener.start()
        try:
            self._arena = Arena(self._pool_bytes, self._device)
            self._transport.register(self._arena.address, self._arena.nbytes)
        except BaseException:
            await self._listener.close()
            raise
        self._sweeper = asyncio.create_task(self._sweep(), name="handoff-sweeper")

    async def close(self) -> None:
        """Stops listening, fails the waiting takes, unregisters the pool; idempotent."""
        if self._closed:
            return
        self._closed = True
        for event in self._waiting.values():
            event.set()
        await self._listener.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            assert self._arena is not None
            if self._table.writing():
                self._arena.keep()
            self._transport.unregister(self._arena.address)
        await asyncio.gather(*self._completing, *self._copying.values(), return_exceptions=True)
        self._verifiers.shutdown(wait=True)

    async def take(self, handoff_id: str, *, deadline_s: float) -> ReceivedSlot:
        """Waits at most ``deadline_s`` for the commit, completes and verifies every plane-layer, and lends the slot.

        Raises HandoffError: deadline_exceeded when nothing was committed in time, checksum_mismatch, or the error
        with which the sender gave up. A failed or cancelled take frees the slot (through quarantine where needed).
        """
        started = time.monotonic()
        slot = await self._committed(handoff_id, started + deadline_s, deadline_s)
        committed = time.monotonic()
        completing = asyncio.create_task(self._complete(slot), name=f"handoff-complete-{handoff_id}")
        self._completing.add(completing)
        completing.add_done_callback(self._completing.discard)
        try:
            await asyncio.shield(completing)
        except asyncio.CancelledError:
            # Held rows may be on their way into the slot still: it is nobody else's before they are there.
            completing.add_done_callback(lambda done: self.release(slot, _error(done)))
            raise
        except Exception as error:
            self.release(slot, error if isinstance(error, HandoffError) else None)
            raise
        timings = dict(slot.committed[min(slot.committed)].timings)
        timings["wait_commit_ms"] = (committed - started) * 1e3
        timings["verify_ms"] = (time.monotonic() - committed) * 1e3
        return ReceivedSlot(self, slot, timings)

    async def abandon(self, handoff_id: str, reason: str) -> None:
        """Drops whatever is there for ``handoff_id``, and refuses a later reserve of it; a slot on loan stays."""
        self._drop(handoff_id, HandoffCode.ABORTED, reason)

    def stats(self) -> dict[str, Any]:
        """``slots`` by state, ``pool_bytes``, ``free_bytes``, ``codes`` by count, ``committed``, ``taken`` ..."""
        pinned = self._arena is not None and self._arena.pinned
        return {**self._table.stats(), "connections": self._listener.connections, "pinned": pinned}

    def release(self, slot: Slot, error: HandoffError | None = None) -> None:
        """Takes a lent slot back; ReceivedSlot.release() calls this."""
        self._table.release(slot, error)
        self._changed.set()

    def block(self, slot: Slot, offset: int, plane: str) -> npt.NDArray[np.uint8]:
        """The bytes of one plane-layer that starts ``offset`` bytes into ``slot``."""
        assert self._arena is not None
        start = slot.offset + offset
        return self._arena.bytes[start : start + self.layout.plane(plane).block_bytes(slot.tokens)]

    async def _committed(self, handoff_id: str, until_s: float, deadline_s: float) -> Slot:
        event = self._waiting.setdefault(handoff_id, asyncio.Event())
        try:
            while True:
                if self._closed:
                    raise HandoffError(HandoffCode.ABORTED, "the decode server is shutting down")
                event.clear()
                slot = self._table.take(handoff_id)
                if slot is not None:
                    return slot
                async with asyncio.timeout(until_s - time.monotonic()):
                    await event.wait()
        except TimeoutError as error:
            message = f"prefill did not commit {handoff_id} within {min(deadline_s, MAX_DEADLINE_S):g} s"
            self._drop(handoff_id, HandoffCode.DEADLINE_EXCEEDED, message)
            raise HandoffError(HandoffCode.DEADLINE_EXCEEDED, message) from error
        except asyncio.CancelledError:
            self._drop(handoff_id, HandoffCode.ABORTED, "the request was cancelled")
            raise
        finally:
            # Another take of the same id must look again: it is told that it is the second.
            event.set()
            if self._waiting.get(handoff_id) is event:
                del self._waiting[handoff_id]

    async def _copy(self, slot: Slot, source: HeldPrefix) -> None:
        """Copies the held rows into a reserved slot, off the event loop, while prefill computes the others."""
        assert self._arena is not None
        held_offsets = self.layout.offsets(source.tokens)
        copies = []
        for (plane, layer), offset in self.layout.offsets(slot.tokens).items():
            nbytes = self.layout.plane(plane).block_bytes(slot.held_tokens)
            start = source.offset + held_offsets[plane, layer]
            copies.append((self.block(slot, offset, plane)[:nbytes], self._arena.bytes[start : start + nbytes]))
        try:
            await self._in_threads(_copy_blocks, copies)
        except Exception as error:
            log.exception("handoff %s: copying the held rows failed", slot.handoff_id)
            self._drop(slot.handoff_id, HandoffCode.ABORTED, f"copying the held rows failed: {error}"[:500])
            raise
        finally:
            del self._copying[slot.generation]
            self._table.copied(slot, time.monotonic())
            self._changed.set()

    async def _complete(self, slot: Slot) -> None:
        """Waits for the held rows and compares the sent ones with their checksums."""
        if (copying := self._copying.get(slot.generation)) is not None:
            await copying
        blocks = []
        for (plane, layer), offset in self.layout.offsets(slot.tokens).items():
            sent = self.block(slot, offset, plane)[self.layout.plane(plane).block_bytes(slot.held_tokens) :]
            blocks.append((f"{plane}/{layer}", sent))
        found = await self._in_threads(_mismatches, blocks, slot.checksums)
        if wrong := sorted(name for names in found for name in names):
            raise HandoffError(
                HandoffCode.CHECKSUM_MISMATCH,
                f"{slot.handoff_id}: {len(wrong)} of {len(blocks)} plane-layers are not what prefill sent, "
                f"e.g. {wrong[0]}",
            )
        self._table.completed(slot)

    async def _in_threads(self, work: Callable[..., T], items: list[Any], *arguments: Any) -> list[T]:
        """``work(share of items, *arguments)`` of every thread; numpy and xxhash let go of the GIL."""
        loop = asyncio.get_running_loop()
        shares = [
            loop.run_in_executor(self._verifiers, work, items[share::VERIFY_THREADS], *arguments)
            for share in range(VERIFY_THREADS)
        ]
        return await asyncio.gather(*shares)

    def _answer(self, request: Request, connection: int) -> Reply:
        now = time.monotonic()
        try:
            if isinstance(request, Reserve):
                slot = self._table.reserve(request, connection, now)
                assert self._arena is not None
                if slot.source is not None and slot.generation not in self._copying:
                    self._copying[slot.generation] = asyncio.create_task(self._copy(slot, slot.source))
                return Reserved(
                    generation=slot.generation,
                    session=self._transport.session,
                    address=self._arena.address + slot.offset,
                    bytes=self.layout.slot_bytes(slot.tokens),
                    held_tokens=slot.held_tokens,
                )
            if isinstance(request, Commit):
                self._table.commit(request, connection, now)
                return Committed()
            self._table.abort(request, connection, now)
            return Aborted()
        except HandoffError as error:
            log.info("handoff %s: %s refused: %s", request.handoff_id, request.type, error)
            raise
        finally:
            self._notify(request.handoff_id)

    def _writer_closed(self, connection: int) -> None:
        for handoff_id in self._table.writer_closed(connection, time.monotonic()):
            log.warning("handoff %s: prefill's control connection closed before its commit", handoff_id)
            self._notify(handoff_id)
        self._changed.set()

    def _drop(self, handoff_id: str, code: HandoffCode, reason: str) -> None:
        self._table.abort(
            Abort.model_construct(handoff_id=handoff_id, generation=None, reason=reason, code=code),
            None,
            time.monotonic(),
        )
        self._notify(handoff_id)

    def _notify(self, handoff_id: str) -> None:
        event = self._waiting.get(handoff_id)
        if event is not None:
            event.set()
        self._changed.set()

    async def _sweep(self) -> None:
        """Lets deadlines and quarantines run out."""
        while True:
            self._changed.clear()
            for handoff_id in self._table.expire(time.monotonic()):
                log.warning("handoff %s: ran out of time", handoff_id)
                self._notify(handoff_id)
            expiry = self._table.next_expiry()
            try:
                async with asyncio.timeout(None if expiry is None else max(0.0, expiry - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                continue


def _copy_blocks(copies: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]) -> None:
    for target, held in copies:
        np.copyto(target, held)


def _mismatches(blocks: list[tuple[str, npt.NDArray[np.uint8]]], expected: dict[str, str]) -> list[str]:
    return [name for name, block in blocks if xxhash.xxh3_64_hexdigest(block.data) != expected[name]]


def _error(done: asyncio.Task[None]) -> HandoffError | None:
    error = None if done.cancelled() else done.exception()
    return error if isinstance(error, HandoffError) else None
