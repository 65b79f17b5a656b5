"""What Slurm says about jobs: one query for all of them, with and without accounting, never by name."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

QUERY_INTERVAL_S = 2.0  # a controller serves hundreds of users
COMMAND_TIMEOUT_S = 30.0
PENDING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"})
_FIELDS = {"JobID": 30, "State": 30, "Reason": 200, "exit_code": 20, "RestartCnt": 10, "NodeList": 1000}


class SlurmError(RuntimeError):
    """A Slurm command is missing, or failed; the message has its words."""


@dataclass(frozen=True)
class SlurmState:
    """One job as Slurm sees it now. ``exit_code`` is negative for a signal; ``reason`` is Slurm's own word."""

    job_id: str
    state: str
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0
    nodes: str = ""

    @property
    def pending(self) -> bool:
        """It has no nodes yet, or no longer."""
        return self.state in PENDING

    @property
    def ended(self) -> bool:
        """Nothing of it runs or will run."""
        return self.state not in PENDING | RUNNING


def command(*argv: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """stdout of a Slurm command. Raises SlurmError."""
    if shutil.which(argv[0]) is None:
        raise SlurmError(f"{argv[0]} is not on the PATH: run this on a login node of the cluster")
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{argv[0]} did not answer within {timeout_s:g} s") from error
    if done.returncode != 0:
        raise SlurmError(f"{argv[0]}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def query(job_ids: Iterable[str]) -> dict[str, SlurmState]:
    """Every job that Slurm still knows, by one squeue; one sacct for those that the controller has forgotten.

    Raises SlurmError when the controller does not answer."""
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    layout = ",".join(f"{name}:{width}|" for name, width in _FIELDS.items())
    # The id that stands there twice: squeue calls a single unknown job an error, and drops it from a list.
    found = _parse_squeue(command("squeue", "-h", "-t", "all", "-j", ",".join([*wanted, wanted[0]]), "-O", layout))
    forgotten = [job for job in wanted if job not in found]
    return found | _ask_accounting(forgotten)


def node_problems(nodes: str) -> dict[str, str]:
    """Node -> ``state: reason`` of those in a node list that cannot run jobs. Empty when Slurm does not say."""
    if not nodes:
        return {}
    problems = {}
    with contextlib.suppress(SlurmError):
        for line in command("sinfo", "-hN", "-n", nodes, "-o", "%N|%T|%E").splitlines():
            name, state, reason = line.strip().split("|", 2)
            if re.search(r"down|fail|\*|drain|boot|power", state, re.IGNORECASE):
                problems[name] = f"{state}: {reason}"
    return problems


def expand_nodes(nodes: str) -> list[str]:
    """``b200-[1-2]`` -> its names, in order; empty when scontrol does not answer."""
    with contextlib.suppress(SlurmError):
        return command("scontrol", "show", "hostnames", nodes).split() if nodes else []
    return []


def cancel(job_id: str, *, gently: bool) -> None:
    """``gently`` asks the batch step to tear down and end (a pending job simply ends); else Slurm ends all steps."""
    with contextlib.suppress(SlurmError):
        if not gently:
            command("scancel", job_id)
            return
        command("scancel", "--state=PENDING", job_id)
        command("scancel", "--batch", "--signal=TERM", job_id)


class Queries:
    """Answers from one query for all jobs, asked at most every `QUERY_INTERVAL_S`."""

    def __init__(self, interval_s: float = QUERY_INTERVAL_S) -> None:
        self.count = 0
        self.problem: str | None = None
        self._interval_s = interval_s
        self._asked_s: float | None = None
        self._states: dict[str, SlurmState] = {}

    def states(self, job_ids: Iterable[str]) -> Mapping[str, SlurmState] | None:
        """New answers, or None when it is too early to ask, or Slurm does not answer (`problem` says why)."""
        now = time.monotonic()
        if self._asked_s is not None and now - self._asked_s < self._interval_s:
            return None
        self._asked_s = now
        self.count += 1
        try:
            self._states = query(job_ids)
        except SlurmError as error:
            self.problem = str(error)
            return None
        self.problem = None
        return self._states


def _parse_squeue(text: str) -> dict[str, SlurmState]:
    found = {}
    for line in text.splitlines():
        fields = dict(zip(_FIELDS, (field.strip() for field in line.split("|")), strict=False))
        if len(fields) == len(_FIELDS) and fields["JobID"].isdigit():
            status = int(fields["exit_code"] or 0)
            found[fields["JobID"]] = SlurmState(
                fields["JobID"],
                fields["State"],
                "" if fields["Reason"] == "None" else fields["Reason"],
                os.waitstatus_to_exitcode(status),
                int(fields["RestartCnt"] or 0),
                fields["NodeList"],
            )
    return found


def _ask_accounting(job_ids: list[str]) -> dict[str, SlurmState]:
    """What sacct remembers; nothing on a cluster without accounting."""
    found: dict[str, SlurmState] = {}
    if job_ids and shutil.which("sacct"):
        with contextlib.suppress(SlurmError):
            text = command("sacct", "-nXP", "-j", ",".join(job_ids), "-o", "JobIDRaw,State,ExitCode,NodeList")
            for line in text.splitlines():
                job, state, code, nodes = line.split("|", 3)
                status, _, number = code.partition(":")
                exit_code = -int(number) if int(number or 0) else int(status)
                found[job] = SlurmState(job, state.split()[0], "", exit_code, 0, nodes)  # "CANCELLED by 1000"
    return found
