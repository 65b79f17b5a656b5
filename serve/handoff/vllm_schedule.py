"""The scheduler half of the vLLM connector: which rows of which hand-off each engine step must stage.

It sees vLLM's requests and scheduler outputs only by the attributes it reads, so it runs without vLLM in tests. It
runs inside the engine core's loop: everything here is bookkeeping, nothing blocks.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter, ValidationError

from serve.handoff.prefix import digest_chain
from serve.handoff.protocol import HandoffCode, HandoffError, HandoffId, Prefix, RequestId, SessionId

_HANDOFF_ID: TypeAdapter[str] = TypeAdapter(HandoffId)
_REQUEST_ID: TypeAdapter[str] = TypeAdapter(RequestId)
_SESSION_ID: TypeAdapter[str] = TypeAdapter(SessionId)
_ADDRESS: TypeAdapter[str] = TypeAdapter(Annotated[str, StringConstraints(max_length=256)])
MAX_ECHO_CHARS = 256
REMEMBERED_IDS = 4096


@dataclass(frozen=True)
class HandoffParams:
    """A request's ``kv_transfer_params``, validated. ``session_id`` names the conversation that it is a turn of."""

    handoff_id: str
    request_id: str
    decode_control: str
    deadline_s: float
    session_id: str | None = None

    @classmethod
    def parse(cls, raw: object, max_deadline_s: float) -> HandoffParams | None:
        """None when the request asks for no hand-off. Raises HandoffError(protocol_error) naming the bad field."""
        if raw is None or raw == {}:
            return None
        if not isinstance(raw, dict):
            raise _malformed(f"kv_transfer_params must be an object, got {type(raw).__name__}")
        handoff_id = _valid(raw, "handoff_id", _HANDOFF_ID)
        request_id = _valid(raw, "request_id", _REQUEST_ID)
        control = _valid(raw, "decode_control", _ADDRESS)
        host, _, port = control.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise _malformed(f"kv_transfer_params.decode_control must be host:port, got {control!r}")
        deadline_s = raw.get("deadline_s", max_deadline_s)
        if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 < deadline_s < math.inf:
            raise _malformed(f"kv_transfer_params.deadline_s must be a positive number of seconds, got {deadline_s!r}")
        session_id = _valid(raw, "session_id", _SESSION_ID) if raw.get("session_id") is not None else None
        return cls(handoff_id, request_id, control, min(float(deadline_s), max_deadline_s), session_id)

    def prefix(self, token_ids: Sequence[int]) -> Prefix | None:
        """What decode is told about the prompt; None without a session, and for a prompt of less than one block."""
        digests = digest_chain(token_ids) if self.session_id is not None else ""
        return Prefix.model_construct(session=self.session_id, digests=digests) if digests else None


def _valid(raw: dict[str, Any], name: str, kind: TypeAdapter[str]) -> str:
    try:
        return kind.validate_python(raw.get(name), strict=True)
    except ValidationError as error:
        raise _malformed(f"kv_transfer_params.{name}: {error.errors()[0]['msg']}") from error


def _malformed(message: str) -> HandoffError:
    return HandoffError(HandoffCode.PROTOCOL_ERROR, message)


@dataclass(frozen=True)
class Chunk:
    """Rows [start, end) of a hand-off that exist once this step has run. ``block_ids`` per KV cache group."""

    params: HandoffParams
    total_tokens: int
    start: int
    end: int
    block_ids: tuple[tuple[int, ...], ...]
    queue_ms: float | None
    prefix: Prefix | None = None
    """With the first chunk."""
    cached_tokens: int | None = None
    """Of the prompt, found in the prefix cache; with the first chunk."""

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.total_tokens


@dataclass(frozen=True)
class Failure:
    """A hand-off that never reached the worker, or must be given up there."""

    handoff_id: str | None
    request_id: str | None
    code: HandoffCode
    reason: str


@dataclass(frozen=True)
class StepPlan:
    """What the workers do in one engine step; travels to them pickled."""

    chunks: tuple[Chunk, ...] = ()
    aborts: tuple[Failure, ...] = ()
    rejects: tuple[Failure, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.chunks or self.aborts or self.rejects)


@dataclass
class _Tracked:
    """One vLLM request with a hand-off."""

    params: HandoffParams
    total_tokens: int
    arrived_s: float
    """At vLLM's server, by the planner's clock."""
    prefix: Prefix | None = None
    block_ids: list[list[int]] = field(default_factory=list)
    first_scheduled_s: float | None = None
    cached_tokens: int = 0
    planned_tokens: int = 0

    @property
    def complete(self) -> bool:
        return self.planned_tokens == self.total_tokens


class HandoffPlanner:
    """Follows every request from arrival to its end. ``max_deadline_s`` caps what a request asks for."""

    def __init__(self, max_deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_deadline_s = max_deadline_s
        self._clock = clock
        self._tracked: dict[str, _Tracked] = {}
        self._failed: dict[str, Failure] = {}
        # Ids that ended stay for a while: the worker may still be sending the hand-off when its request is gone.
        self._used_ids: OrderedDict[str, None] = OrderedDict()
        self._rejects: list[Failure] = []
        self._aborts: list[Failure] = []

    def track(self, request: Any) -> None:
        """Takes note of a vLLM request; a second call for the same one does nothing. Bad parameters never raise."""
        key = request.request_id
        if key in self._tracked or key in self._failed:
            return
        raw = getattr(request, "kv_transfer_params", None)
        try:
            params = HandoffParams.parse(raw, self._max_deadline_s)
            if params is None:
                return
            if params.handoff_id in self._used_ids:
                raise HandoffError(HandoffCode.DUPLICATE_HANDOFF, f"hand-off id {params.handoff_id} was used before")
        except HandoffError as error:
            failure = Failure(_echo(raw, "handoff_id"), _echo(raw, "request_id"), error.code, error.message)
            self._failed[key] = failure
            self._rejects.append(failure)
            return
        self._used_ids[params.handoff_id] = None
        while len(self._used_ids) > len(self._tracked) + REMEMBERED_IDS:
            self._used_ids.popitem(last=False)
        arrived_s = self._clock() - _waited_s(request)
        self._tracked[key] = _Tracked(params, request.num_prompt_tokens, arrived_s, _prefix_of(params, request))

    def plan(self, scheduler_output: Any) -> StepPlan:
        """The rows that become available in this step, from vLLM's SchedulerOutput (read only)."""
        chunks = []
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                tracked.block_ids = [list(group) for group in new.block_ids]
                tracked.cached_tokens = new.num_computed_tokens
                chunks.append(self._advance(tracked, new.num_computed_tokens + scheduled.get(new.req_id, 0)))
        cached = scheduler_output.scheduled_cached_reqs
        for index, key in enumerate(cached.req_ids):
            tracked = self._tracked.get(key)
            if tracked is not None:
                _take_blocks(tracked, cached.new_block_ids[index], resumed=_is_resumed(cached, index))
                chunks.append(self._advance(tracked, cached.num_computed_tokens[index] + scheduled.get(key, 0)))
        aborts, self._aborts = self._aborts, []
        rejects, self._rejects = self._rejects, []
        return StepPlan(tuple(chunk for chunk in chunks if chunk is not None), tuple(aborts), tuple(rejects))

    def _advance(self, tracked: _Tracked, computed_tokens: int) -> Chunk | None:
        """The chunk up to ``computed_tokens``; rows of a prefix-cache hit come with the first one.

        Rows computed again after a preemption are not sent again: the same tokens give the same rows.
        """
        if tracked.first_scheduled_s is None:
            tracked.first_scheduled_s = self._clock()
        start, end = tracked.planned_tokens, min(computed_tokens, tracked.total_tokens)
        if end <= start:
            return None
        tracked.planned_tokens = end
        return Chunk(
            params=tracked.params,
            total_tokens=tracked.total_tokens,
            start=start,
            end=end,
            block_ids=tuple(tuple(group) for group in tracked.block_ids),
            queue_ms=(tracked.first_scheduled_s - tracked.arrived_s) * 1e3,
            prefix=tracked.prefix if start == 0 else None,
            cached_tokens=tracked.cached_tokens if start == 0 else None,
        )

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forgets a request that ended; the dict is the answer's ``kv_transfer_params``, None without a hand-off.

        ``handoff`` is "sent" when every row was staged (the commit may still be under way, and may still fail: the
        decode server has the last word), "aborted" when the request ended before, "failed" with ``code`` and
        ``message`` when its parameters were refused.
        """
        failure = self._failed.pop(request.request_id, None)
        if failure is not None:
            return {
                "handoff_id": failure.handoff_id,
                "handoff": "failed",
                "code": failure.code.value,
                "message": failure.reason,
            }
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        params = tracked.params
        status = getattr(request.status, "name", str(request.status))
        # A request that was aborted after its last chunk has no client any more: nobody would take the slot.
        if tracked.complete and status != "FINISHED_ABORTED":
            return {"handoff_id": params.handoff_id, "handoff": "sent"}
        reason = f"the prefill of request {params.request_id} ended early ({status})"
        if tracked.planned_tokens:
            self._aborts.append(Failure(params.handoff_id, params.request_id, HandoffCode.ABORTED, reason))
        else:
            self._rejects.append(Failure(params.handoff_id, params.request_id, HandoffCode.ABORTED, reason))
        return {"handoff_id": params.handoff_id, "handoff": "aborted"}

    def give_up(self, reason: str) -> None:
        """Fails every hand-off that is not complete: after an error in here it is unknown what they still miss."""
        for key, tracked in list(self._tracked.items()):
            if tracked.complete:
                continue
            del self._tracked[key]
            params = tracked.params
            failure = Failure(params.handoff_id, params.request_id, HandoffCode.ABORTED, reason)
            self._failed[key] = failure
            (self._aborts if tracked.planned_tokens else self._rejects).append(failure)

    @property
    def live(self) -> int:
        """Requests with a hand-off that have not ended."""
        return len(self._tracked)


def _echo(raw: object, name: str) -> str | None:
    """The field as sent when it is fit to be shown in an answer or a log."""
    value = raw.get(name) if isinstance(raw, dict) else None
    return value if isinstance(value, str) and len(value) <= MAX_ECHO_CHARS else None


def _waited_s(request: Any) -> float:
    """Since vLLM's server took the request: the engine core sees it only between two steps, and a step may be long.

    0 where vLLM does not say, or where its server's clock is ahead of ours; one that is behind, on another node, adds.
    """
    arrival_time = getattr(request, "arrival_time", None)
    return 0.0 if arrival_time is None else max(0.0, time.time() - float(arrival_time))


def _prefix_of(params: HandoffParams, request: Any) -> Prefix | None:
    """None also where equal token ids do not mean equal rows: images, adapters, embeddings, salted caches."""
    token_ids = getattr(request, "prompt_token_ids", None)
    others = [getattr(request, name, None) for name in ("mm_features", "lora_request", "prompt_embeds", "cache_salt")]
    if token_ids is None or any(other is not None and other != [] for other in others):
        return None
    return params.prefix(token_ids)


def _is_resumed(cached: Any, index: int) -> bool:
    """Whether a cached request comes back from preemption, so that its block ids replace the old ones."""
    resumed_ids = getattr(cached, "resumed_req_ids", None)
    if resumed_ids is not None:
        return cached.req_ids[index] in resumed_ids
    # vLLM before resumed_req_ids had a list of flags.
    return bool(cached.resumed_from_preemption[index])


def _take_blocks(tracked: _Tracked, new_block_ids: Sequence[Sequence[int]] | None, *, resumed: bool) -> None:
    if resumed:
        tracked.block_ids = [list(group) for group in new_block_ids or ()]
        return
    for known, new in zip(tracked.block_ids, new_block_ids or (), strict=False):
        known.extend(new)
