"""Codes of what is only seen while a job runs: its end, its hand-offs, its verdicts. One list for all."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from benchmarks.verdict import Reason, ReasonCode
from runners.finding import Finding
from runners.outcome import JobCode, Outcome
from runners.preflight.registry import REGISTRY, declare
from serve.handoff.protocol import HandoffCode, HandoffError

JOB = {
    JobCode.STAGING_FAILED: ("weights could not be staged", "read logs/weights.log in the job's folder"),
    JobCode.PORT_TAKEN: ("a port was taken between planning and start", "run it again; ports are chosen anew"),
    JobCode.START_FAILED: ("a process could not be started", "look at the program, image and paths of that role"),
    JobCode.ROLE_DIED: ("a process ended while it was needed", "read its last lines in the report"),
    JobCode.NOT_READY: ("a process did not answer in time", "read its log, or raise readiness-timeout-s"),
    JobCode.CANARY_FAILED: ("generations through the router were wrong or late", "read the router's and decode's logs"),
    JobCode.ROLE_UNRESPONSIVE: ("a process stopped answering", "read its log around the time of the event"),
    JobCode.TIME_LIMIT: ("the allocation ended first", "raise time-limit-min, or measure fewer points"),
    JobCode.INTERRUPTED: ("somebody interrupted the job", "run it again"),
    JobCode.TEARDOWN_INCOMPLETE: ("a process would not end", "end it by its pid, which the outcome names"),
    JobCode.ORCHESTRATOR_LOST: ("the job's own process is gone", "look for the kernel's out-of-memory killer"),
    JobCode.ALLOCATION: (
        "nodes of the allocation cannot be used",
        "look at the node and reason that the outcome names",
    ),
    JobCode.FOLDER_NOT_SHARED: ("a node does not see the run folder", "use an --output-dir that every node mounts"),
    JobCode.DISK_FULL: ("a disk has no room", "free some space on the disk that the outcome names"),
    JobCode.OUT_OF_MEMORY: ("Slurm ended a step for its memory", "ask for more, or lower pools and caches"),
    JobCode.NODE_FAILED: ("a node went down", "run it again; other points are kept by resume"),
    JobCode.PREEMPTED: ("another job took the nodes", "run it again, or use a QOS that is not preempted"),
    JobCode.REQUEUED: ("Slurm started the job a second time", "submit with --no-requeue and run it again"),
    JobCode.CANCELLED: ("somebody cancelled the job", "run it again"),
    JobCode.PENDING_DEADLINE: ("the job waited too long for nodes", "look at Slurm's reason; ask for fewer nodes"),
    JobCode.SUBMISSION_FAILED: ("sbatch refused the job", "run `baton preflight`: it asks sbatch --test-only"),
    JobCode.INTERNAL: ("a defect of this program", "report it with the traceback in the job's log"),
}
HANDOFF = {
    HandoffCode.VERSION_MISMATCH: ("both sides speak other protocol versions", "run one release on both roles"),
    HandoffCode.LAYOUT_MISMATCH: ("both sides derive other KV layouts", "serve one checkpoint and KV dtype on both"),
    HandoffCode.POOL_EXHAUSTED: ("decode's receive pool is full", "raise pool-mib or lower the concurrency"),
    HandoffCode.DUPLICATE_HANDOFF: ("a hand-off id was used twice", "one router per decode; restart it"),
    HandoffCode.UNKNOWN_HANDOFF: ("decode does not know the hand-off", "look for a deadline that ended it"),
    HandoffCode.STALE_GENERATION: ("a writer came after its slot was given away", "look why prefill was late"),
    HandoffCode.DEADLINE_EXCEEDED: ("reserve to commit took too long", "raise deadline-s, or look at wire_ms"),
    HandoffCode.CHECKSUM_MISMATCH: ("bytes arrived wrong", "suspect memory, driver or transport; do not publish"),
    HandoffCode.SHORT_WRITE: ("fewer bytes than rows were committed", "a layer was not sent: look at prefill's log"),
    HandoffCode.ABORTED: ("one side gave up", "the reason is in the message"),
    HandoffCode.TRANSPORT_FAILED: ("the transport failed", "check RDMA devices and firewalls between the nodes"),
    HandoffCode.PEER_UNREACHABLE: ("the other side cannot be reached", "check that it runs and its port is open"),
    HandoffCode.PROTOCOL_ERROR: ("a message breaks the protocol, or token ids differ", "run one release on all roles"),
    HandoffCode.TOO_LARGE: ("a prompt is larger than the pool", "raise pool-mib to one full context"),
    HandoffCode.STAGING_EXHAUSTED: ("prefill's staging is full", "raise staging-mib or lower the concurrency"),
}
VERDICT = {
    ReasonCode.MISSING_POINTS: ("planned points have no result", "read the outcome of the job"),
    ReasonCode.INCOMPLETE: ("fewer records than requests, or unplanned points", "read the client's log"),
    ReasonCode.CANCELLED: ("the measurement was cancelled", "run it again"),
    ReasonCode.CLIENT_FAILED: ("the client program failed", "read raw/ of the point"),
    ReasonCode.CLIENT_TIMEOUT: ("the point took longer than its limit", "raise point-timeout-s or ask for less"),
    ReasonCode.FAILED_REQUESTS: ("too many requests failed", "the first errors are in the reason"),
    ReasonCode.TRUNCATED_STREAM: ("streams ended early", "look at decode's log for the request ids"),
    ReasonCode.ZERO_TOKENS: ("requests succeeded without a token", "look at the hand-off: every transfer may fail"),
    ReasonCode.OUTPUT_LENGTH_MISMATCH: ("outputs have another length than asked", "check ignore-eos and stop tokens"),
    ReasonCode.PREFIX_CACHE_HIT: ("prompts came from a cache", "use other seeds, or switch the prefix cache off"),
    ReasonCode.CLIENT_SATURATED: ("the client was the bottleneck", "give it more cores, or lower the concurrency"),
    ReasonCode.CLIENT_OUT_OF_RANGE: (
        "the client was never checked at this load",
        "run `baton calibrate` for this request rate, or measure less load",
    ),
    ReasonCode.CLOCK_INCONSISTENT: ("clocks of two nodes disagree", "synchronise them (chrony)"),
    ReasonCode.STAGES_MISSING: ("a process wrote no stage records", "check its --stage-log and disk"),
    ReasonCode.ROLE_RESTARTED: ("a process restarted in the middle", "read its log; the point does not count"),
    ReasonCode.SIMULATED_ACCEPTANCE: ("an eval saw simulated acceptance", "run it with real acceptance"),
    ReasonCode.ACCEPTANCE_OFF_TARGET: (
        "simulated acceptance came out at another length",
        "check the engine's acceptance knob, and that prefill sends the MTP layer's rows",
    ),
    ReasonCode.EMPTY_CONTENT: ("answers have no content", "check reasoning and tool parsers of the engine"),
    ReasonCode.SCORE_BELOW_THRESHOLD: ("the score is below the threshold", "compare with the model's published score"),
    ReasonCode.REPLAY_CUT: ("sessions were not replayed to their end", "raise duration-s, or replay fewer sessions"),
    ReasonCode.REPLAY_REORDERED: ("turns of a session came in another order", "look at the client's log"),
    ReasonCode.REPLAY_REPEATED: ("a session was sent twice", "replay a larger corpus, or for a shorter duration-s"),
    ReasonCode.REPLAY_ALTERED: ("prompts were not the planned ones", "look whether a proxy or template rewrites them"),
    ReasonCode.REPLAY_TIMING: ("turns were not sent when due", "give the client more cores, or lower conc-list"),
    ReasonCode.CACHE_HIT_MISMATCH: (
        "the servers' prefix cache hits do not fit what was sent",
        "check the prefix cache, and that no other client uses the servers",
    ),
}


def _name(kind: str, code: str) -> str:
    return f"{kind}-{code.replace('_', '-')}"


_FIXES: dict[str, str] = {}
_MEMBERS: tuple[tuple[str, type[StrEnum], Mapping[Any, tuple[str, str]]], ...] = (
    ("job", JobCode, JOB),
    ("handoff", HandoffCode, HANDOFF),
    ("verdict", ReasonCode, VERDICT),
)
for _kind, _codes, _table in _MEMBERS:
    for _member in _codes:
        if _member is JobCode.COMPLETED:
            continue
        # A code that is too new to be in the table is still in the list.
        _plain = (_member.value.replace("_", " "), "look at the message, and at the log of the process it names")
        _description, _fix = _table.get(_member, _plain)
        declare(_name(_kind, _member.value), "error", "runtime", _description)
        _FIXES[_name(_kind, _member.value)] = _fix


def of_outcome(outcome: Outcome) -> Finding | None:
    """The end of a job as a finding; None when every point was tried."""
    if outcome.code == JobCode.COMPLETED:
        return None
    where = f"{outcome.process} on node {outcome.node}" if outcome.process else "the job"
    return _finding("job", outcome.code.value, where, outcome.message)


def of_handoff(failure: HandoffError, where: str) -> Finding:
    """A failed hand-off as a finding."""
    return _finding("handoff", failure.code.value, where, failure.message)


def of_reason(reason: Reason, point: str) -> Finding:
    """A reason against a point as a finding."""
    return _finding("verdict", reason.code.value, point, reason.message)


def _finding(kind: str, code: str, where: str, message: str) -> Finding:
    name = _name(kind, code)
    return REGISTRY[name].at(where, message, _FIXES[name])
