"""Many Slurm jobs of one sweep: submitted up to a limit, watched with one query, tried again where the site failed.

The state of everything is in the run folder, so this process may die at any time: jobs go on, and a new fleet over the
same specs takes up the running ones, collects those that have ended and submits only what is missing.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.job import JobSpec
from runners import points, slurm
from runners.events import Event, EventReader
from runners.follow import Interruptions
from runners.orchestrate import keep_earlier
from runners.outcome import INFRASTRUCTURE, JobCode, Outcome, PointOutcome, log_tail
from runners.submit import Submission, SubmitError, submit_slurm

POLL_S = 0.1
FORGOTTEN_AFTER_S = 10.0  # a job that was just submitted may not be listed yet
CANCEL_DEADLINE_S = 60.0
STATE_CODES = {
    "CANCELLED": JobCode.CANCELLED,
    "PREEMPTED": JobCode.PREEMPTED,
    "NODE_FAIL": JobCode.NODE_FAILED,
    "BOOT_FAIL": JobCode.NODE_FAILED,
    "TIMEOUT": JobCode.TIME_LIMIT,
    "DEADLINE": JobCode.TIME_LIMIT,
    "OUT_OF_MEMORY": JobCode.OUT_OF_MEMORY,
}
NODE_FAILURE = re.compile(r"[Nn]ode failure on ([A-Za-z0-9._-]+)")
# The next try does without the node; one that was only taken away is as good as any.
BLAME_THE_NODE = frozenset({JobCode.NODE_FAILED, JobCode.ALLOCATION})
# An outcome with one of these may be only what Slurm's own action looked like from inside.
ECHOES = frozenset({JobCode.ROLE_DIED, JobCode.INTERRUPTED, JobCode.ORCHESTRATOR_LOST, JobCode.ROLE_UNRESPONSIVE})


class Member:
    """One job of the fleet."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.name = spec.job_dir().name
        self.submission = Submission.read(spec.job_dir())
        self.reader = EventReader(spec.job_dir() / "events.jsonl")
        self.state: slurm.SlurmState | None = None
        self.outcome: Outcome | None = None
        self.ours = False  # submitted or taken up by this fleet, and not yet ended
        self.given_up: JobCode | None = None
        self.failed: Outcome | None = None
        self.excluded: tuple[str, ...] = ()
        self.seen_s = time.monotonic()

    @property
    def attempt(self) -> int:
        """Submissions so far."""
        return self.submission.attempt if self.submission else 0

    def finished_before(self) -> Outcome | None:
        """The outcome of a job that needs no more work: every point has a result."""
        outcome = Outcome.read(self.spec.job_dir())
        complete = all(points.read_result(self.spec.job_dir(), point.id)[0] for point in self.spec.points)
        return outcome if outcome and complete and outcome.outcome == "completed" else None


class Fleet:
    """Runs specs that are bound to one run folder; `run` returns one outcome a spec, None for one never submitted."""

    def __init__(
        self,
        specs: Sequence[JobSpec],
        interruptions: Interruptions,
        on_event: Callable[[Event], None],
        note: Callable[[str], None],
        *,
        submit: Callable[..., Submission] = submit_slurm,
        queries: slurm.Queries | None = None,
    ) -> None:
        self.members = [Member(spec) for spec in specs]
        self.queries = queries or slurm.Queries()
        self._site: dict[str, Any] = specs[0].cluster_profile["slurm"]
        self._interruptions = interruptions
        self._on_event = on_event
        self._note = note
        self._submit = submit
        self._cancelled_s: float | None = None
        self._killed = False

    def run(self) -> list[Outcome | None]:
        """Until every job has ended, or the first interruption has ended them all.

        SIGTERM and SIGHUP only end the watching: the jobs go on and can be taken up again."""
        self._take_up()
        while not self._detached() and (self._submit_more() or self._active()):
            self._look()
            self._stop_if_asked()
            time.sleep(POLL_S)
        for member in self.members:
            self._relay(member)
        return [member.outcome for member in self.members]

    def _take_up(self) -> None:
        """Jobs of an earlier sweep over this folder: done, still running, or to be tried again."""
        known = [member.submission.job_id for member in self.members if member.submission]
        states = slurm.query(known)
        for member in self.members:
            member.outcome = member.finished_before()  # also one that was never submitted: all of it was reused
            if member.submission is None:
                continue
            state = states.get(member.submission.job_id)
            if member.outcome is None and state is not None and not state.ended:
                member.ours, member.state = True, state
                self._note(f"{member.name}: taken up, Slurm job {state.job_id} is {state.state}")

    def _active(self) -> list[Member]:
        return [member for member in self.members if member.ours]

    def _submit_more(self) -> bool:
        """Submits up to the limit; whether anything is still to be submitted."""
        waiting = [member for member in self.members if not member.ours and member.outcome is None]
        room = self._site["max-jobs"] - len(self._active())
        for member in waiting[: max(room, 0)] if not self._interruptions.count else ():
            self._submit_one(member)
        return bool(waiting) and not self._interruptions.count

    def _submit_one(self, member: Member) -> None:
        attempt = member.attempt + 1
        try:
            keep_earlier(member.spec.job_dir())
            member.submission = self._submit(member.spec, attempt=attempt, exclude=member.excluded)
        except SubmitError as error:
            refused = self._from_outside(member, JobCode.SUBMISSION_FAILED, str(error))
            if member.failed is not None:  # the first cause counts, not that there was no second chance
                refused = replace(member.failed, message=f"{member.failed.message}; no further try: {error}")
            self._end(member, refused)
            return
        member.ours, member.state, member.seen_s = True, None, time.monotonic()
        again = f", attempt {attempt}" if attempt > 1 else ""
        self._note(f"{member.name}: Slurm job {member.submission.job_id}{again}")

    def _look(self) -> None:
        active = self._active()
        for member in active:
            self._relay(member)
            outcome = self._own_outcome(member)
            if outcome is not None and outcome.outcome == "completed":
                self._end(member, outcome)  # nothing that Slurm might add would change it
        states = self.queries.states(m.submission.job_id for m in active if m.submission)
        if states is None:
            return
        for member in self._active():
            assert member.submission is not None
            state = states.get(member.submission.job_id)
            if state is None:
                if time.monotonic() - member.seen_s > FORGOTTEN_AFTER_S:
                    self._settle(member, slurm.SlurmState(member.submission.job_id, "FORGOTTEN"))
                continue
            self._show_change(member, state)
            member.state, member.seen_s = state, time.monotonic()
            if state.ended or (state.state == "COMPLETING" and self._has_the_last_word(member)):
                self._settle(member, state)
            elif state.pending:
                self._check_deadline(member, state)

    def _own_outcome(self, member: Member) -> Outcome | None:
        """outcome.json of this attempt: that of an earlier one was moved away before this one was submitted."""
        return Outcome.read(member.spec.job_dir())

    def _has_the_last_word(self, member: Member) -> bool:
        """Whether Slurm's verdict would change nothing: a job with a dead node is COMPLETING until it is missed."""
        outcome = self._own_outcome(member)
        return outcome is not None and outcome.code not in ECHOES

    def _check_deadline(self, member: Member, state: slurm.SlurmState) -> None:
        minutes = self._site["pending-deadline-min"]
        assert member.submission is not None
        if minutes is None or member.given_up or time.time() - member.submission.submitted_s < 60 * minutes:
            return
        member.given_up = JobCode.PENDING_DEADLINE
        self._note(f"{member.name}: pending ({state.reason}) for {minutes:g} min, given up")
        slurm.cancel(state.job_id, gently=False)
        message = f"no nodes within {minutes:g} min; Slurm's reason: {state.reason}"
        self._end(member, self._from_outside(member, JobCode.PENDING_DEADLINE, message, state))

    def _settle(self, member: Member, state: slurm.SlurmState) -> None:
        """The job has ended: its own word and Slurm's make the outcome; another try where neither blames the job."""
        outcome = merge(member.spec, self._own_outcome(member), state, self._log(member))
        tries = 1 + int(self._site["retries"])
        if outcome.code in INFRASTRUCTURE and member.attempt < tries and not self._interruptions.count:
            if outcome.host and outcome.code in BLAME_THE_NODE:
                member.excluded = (*member.excluded, outcome.host)
            outcome.write(member.spec.job_dir())
            member.failed = outcome
            self._note(f"{member.name}: {outcome.code}: {outcome.message}; trying again")
            member.ours = False
            return
        self._end(member, outcome)

    def _end(self, member: Member, outcome: Outcome) -> None:
        self._relay(member)
        outcome.write(member.spec.job_dir())
        member.outcome, member.ours = outcome, False

    def _from_outside(
        self, member: Member, code: JobCode, message: str, state: slurm.SlurmState | None = None
    ) -> Outcome:
        return from_outside(member.spec, code, message, state, self._log(member))

    def _log(self, member: Member) -> Path | None:
        return member.submission.log if member.submission else None

    def _relay(self, member: Member) -> None:
        for event in member.reader.new():
            self._on_event(event)

    def _show_change(self, member: Member, state: slurm.SlurmState) -> None:
        before = member.state
        if before is None or (before.state, before.reason) != (state.state, state.reason):
            why = f" ({state.reason})" if state.pending else f" on {state.nodes}" if state.nodes else ""
            self._note(f"{member.name}: {state.state}{why}")

    def _detached(self) -> bool:
        return self._interruptions.last in (signal.SIGTERM, signal.SIGHUP)

    def _stop_if_asked(self) -> None:
        if not self._interruptions.count or self._detached():
            return
        now = time.monotonic()
        if self._cancelled_s is None:
            self._note("interrupted: cancelling every job (once more to kill)")
            self._cancelled_s = now
            for member in self._active():
                assert member.submission is not None
                slurm.cancel(member.submission.job_id, gently=True)
        elif not self._killed and (self._interruptions.count > 1 or now - self._cancelled_s > CANCEL_DEADLINE_S):
            self._killed = True
            for member in self._active():
                assert member.submission is not None
                slurm.cancel(member.submission.job_id, gently=False)


def merge(spec: JobSpec, own: Outcome | None, state: slurm.SlurmState, log: Path | None) -> Outcome:
    """One outcome out of what the orchestrator wrote and what Slurm did to it."""
    code = STATE_CODES.get(state.state)
    if own is not None and (own.outcome == "completed" or code is None or own.code not in ECHOES):
        return replace(own, slurm=_record(state))
    if code is JobCode.CANCELLED and own is not None and own.code is JobCode.INTERRUPTED:
        message = f"cancelled: {own.message}"
    elif code is not None:
        message = f"Slurm ended the job: {state.state}" + (f" ({state.reason})" if state.reason else "")
    else:
        code, message = _unexplained(state, log)
    outcome = from_outside(spec, code, message, state, log)
    if own is not None:
        outcome = replace(
            own, outcome=outcome.outcome, code=code, message=f"{message}; {own.message}", slurm=outcome.slurm
        )
    if code is JobCode.NODE_FAILED:
        outcome = _name_node(spec, outcome, state)
    return outcome


def from_outside(
    spec: JobSpec, code: JobCode, message: str, state: slurm.SlurmState | None, log: Path | None
) -> Outcome:
    """An outcome for a job that could not write its own; points that have a result keep it."""
    found = []
    for point in spec.points:
        result, _ = points.read_result(spec.job_dir(), point.id)
        found.append(
            PointOutcome(point.id, "produced", result.verdict.valid) if result else PointOutcome(point.id, "not_run")
        )
    return Outcome(
        outcome="interrupted" if code is JobCode.CANCELLED else "failed",
        code=code,
        message=message,
        points=tuple(found),
        exit_code=state.exit_code if state else None,
        log=str(log) if log else None,
        log_tail=log_tail(log),
        slurm=_record(state) if state else None,
    )


def _record(state: slurm.SlurmState) -> dict[str, Any]:
    return {
        "job_id": state.job_id,
        "state": state.state,
        "reason": state.reason,
        "exit_code": state.exit_code,
        "restarts": state.restarts,
        "nodes": state.nodes,
    }


def _unexplained(state: slurm.SlurmState, log: Path | None) -> tuple[JobCode, str]:
    if state.state == "FAILED" and (log is None or not log.exists()):
        # slurmd could not even open the log: exit code 0:53, and no word anywhere.
        return (
            JobCode.FOLDER_NOT_SHARED,
            f"the job left no log: node {state.nodes or '?'} cannot write {log.parent if log else 'its folder'}; "
            "--output-dir must be on a disk that all nodes share",
        )
    return JobCode.ORCHESTRATOR_LOST, (
        f"the orchestrator ended without an outcome (Slurm: {state.state}, {state.reason or 'no reason'}): killed, out "
        "of memory, or it could not start"
    )


def _name_node(spec: JobSpec, outcome: Outcome, state: slurm.SlurmState) -> Outcome:
    """Which of the job's nodes is down, and the first role that ran there."""
    names = slurm.expand_nodes(state.nodes)
    host, problem = _lost_node(spec, names, slurm.node_problems(state.nodes))
    if host is None:
        return outcome
    index = names.index(host)
    process = next((process for process in spec.processes if process.node == index), None)
    log = spec.job_dir() / "logs" / f"{process.name}.log" if process else None
    return replace(
        outcome,
        message=f"{outcome.message}; node {host} {problem}",
        host=host,
        node=index,
        role=process.role if process else None,
        process=process.name if process else None,
        log=str(log) if log else outcome.log,
        log_tail=log_tail(log) or outcome.log_tail,
    )


def _lost_node(spec: JobSpec, names: Sequence[str], problems: dict[str, str]) -> tuple[str | None, str]:
    """(name, what is wrong with it) of the node that failed; a node may be back before anybody asks."""
    for name in names:
        if name in problems:
            return name, f"is {problems[name]}"
    for path in sorted((spec.job_dir() / "logs").glob("*.step.log")):
        for line in log_tail(path):
            found = NODE_FAILURE.search(line)
            if found and found.group(1) in names:
                return found.group(1), "failed"
    return (names[0], "failed") if len(names) == 1 else (None, "")
