"""Runs the steps of a workflow on this machine: their own commands, in their order, where their ``if:`` says so.

What GitHub does around the commands is done here with real git and folders: a checkout is a clone at a commit, an
artifact is a copy, outputs and summaries are files. Names that an artifact may not have are refused as GitHub does.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from runners.bindings import REPO
from tests.ci.expressions import condition, fill, text_of

WORKFLOWS = REPO / ".github" / "workflows"
REFUSED_NAME = re.compile(r'["<>|*?:\r\n\\]')
STEP_TIMEOUT_S = 240


def read(name: str) -> dict[str, Any]:
    """A workflow as data."""
    loaded: dict[str, Any] = YAML(typ="safe").load((WORKFLOWS / name).read_text())
    return loaded


@dataclass
class Job:
    """What became of one job (one a matrix element)."""

    name: str
    result: str
    outputs: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Run:
    """One run of a workflow: an event, a repository that is cloned, artifacts that jobs hand on."""

    def __init__(
        self,
        workflow: dict[str, Any],
        folder: Path,
        *,
        origin: Path,
        event_name: str,
        event: Mapping[str, Any],
        sha: str,
        inputs: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        run_id: str = "7",
        ref_name: str = "main",
        path: str = "",
    ) -> None:
        self.workflow, self.folder, self.origin, self.path = workflow, folder, origin, path
        self.artifacts = folder / "artifacts"
        self.summary = folder / "summary.md"
        self.artifacts.mkdir(parents=True)
        github = {"event_name": event_name, "event": event, "repository": "owner/baton", "sha": sha, "run_id": run_id}
        github |= {"ref": f"refs/heads/{ref_name}", "ref_name": ref_name, "token": "the-job-token"}
        github |= {"server_url": "https://github.com"}
        self.contexts: dict[str, Any] = {"github": github, "inputs": inputs or {}, "vars": variables or {}}
        self.contexts |= {"secrets": {}, "needs": {}}
        self.jobs: dict[str, list[Job]] = {}

    def run(self, *names: str) -> dict[str, list[Job]]:
        """Runs the jobs of these names, or all, after those that they need."""
        for name, job in self.workflow["jobs"].items():
            if not names or name in names:
                self.jobs[name] = self._job(name, job)
        return self.jobs

    def _job(self, name: str, job: dict[str, Any]) -> list[Job]:
        needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        contexts = {**self.contexts, "needs": {need: self._needed(need) for need in needs}}
        results = [contexts["needs"][need]["result"] for need in needs]
        status = {
            "success": lambda: all(result == "success" for result in results),
            "failure": lambda: "failure" in results,
            "cancelled": lambda: False,
            "always": lambda: True,
        }
        if not condition(job.get("if"), contexts, status):
            return [Job(name, "skipped")]
        matrix = fill(job.get("strategy", {}).get("matrix", {}), contexts)
        elements = [{key: value} for key, values in matrix.items() for value in values] or [{}]
        return [self._element(name, job, {**contexts, "matrix": element}) for element in elements]

    def _needed(self, name: str) -> dict[str, Any]:
        found = self.jobs[name]
        results = {job.result for job in found}
        result = "failure" if "failure" in results else found[0].result
        return {"result": result, "outputs": found[-1].outputs}

    def _element(self, name: str, job: dict[str, Any], contexts: dict[str, Any]) -> Job:
        title = text_of(fill(job.get("name", name), contexts))
        done = Job(title, "success")
        workspace = self.folder / "workspaces" / re.sub(r"\W+", "-", title)
        steps: dict[str, Any] = {}
        contexts = {**contexts, "steps": steps, "env": {}}
        contexts["env"] = {key: text_of(value) for key, value in fill(job.get("env", {}), contexts).items()}
        functions = {
            "success": lambda: not done.failed,
            "failure": lambda: bool(done.failed),
            "cancelled": lambda: False,
            "always": lambda: True,
            "hashFiles": lambda pattern: "h" if list(workspace.glob(pattern)) else "",
        }
        for step in job["steps"]:
            if not condition(step.get("if"), contexts, functions):
                continue
            outputs: dict[str, str] = {}
            done.ran.append(step["name"])
            try:
                if "uses" in step:
                    self._action(step["uses"], fill(step.get("with", {}), contexts), workspace)
                else:
                    own = {key: text_of(value) for key, value in fill(step.get("env", {}), contexts).items()}
                    log = self._command(step["run"], {**contexts["env"], **own}, workspace, outputs)
                    done.log.append(log)
            except subprocess.CalledProcessError as error:
                done.log.append(error.output)
                done.failed.append(step["name"])
            if "id" in step:
                steps[step["id"]] = {"outputs": outputs, "outcome": "failure" if done.failed else "success"}
        done.outputs = {key: text_of(value) for key, value in fill(job.get("outputs", {}), contexts).items()}
        done.result = "failure" if done.failed else "success"
        return done

    def _command(self, command: str, env: Mapping[str, str], workspace: Path, outputs: dict[str, str]) -> str:
        told = workspace.parent / "output"
        told.write_text("")
        environment = {
            "PATH": f"{self.path}{os.environ['PATH']}",
            "HOME": str(workspace.parent),
            "PYTHONPATH": str(workspace),
            "NO_COLOR": "1",
            "GITHUB_OUTPUT": str(told),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_SERVER_URL": "https://github.com",
            "GITHUB_REPOSITORY": "owner/baton",
            "GITHUB_RUN_ID": self.contexts["github"]["run_id"],
            **env,
        }
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command]
        done = subprocess.run(
            shell, cwd=workspace, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=STEP_TIMEOUT_S,
        )  # fmt: skip
        outputs.update(line.split("=", 1) for line in told.read_text().splitlines())
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
        return done.stdout

    def _action(self, uses: str, given: dict[str, Any], workspace: Path) -> None:
        action = uses.partition("@")[0]
        if action == "actions/checkout":
            checkout(self.origin, text_of(given["ref"]), workspace)
        elif action == "actions/upload-artifact":
            source = workspace / text_of(given["path"])
            if source.exists() or given.get("if-no-files-found") == "error":
                upload(source, self.artifacts / text_of(given["name"]))
        elif action == "actions/download-artifact" and "name" in given:
            shutil.copytree(self.artifacts / given["name"], workspace / given["path"])
        elif action == "actions/download-artifact":
            found = list(self.artifacts.glob(given["pattern"]))
            for artifact in found:  # one alone gets no folder of its own
                shutil.copytree(artifact, workspace / given["path"] / (artifact.name if len(found) > 1 else ""))
        else:
            raise ValueError(f"{uses} is not known here")


def checkout(origin: Path, ref: str, workspace: Path) -> None:
    """A clone at ``ref``, with this environment in the place of the one that `make setup` would make."""
    if not workspace.exists():
        workspace.parent.mkdir(parents=True, exist_ok=True)
        git(workspace.parent, "clone", "--quiet", "--no-local", str(origin), str(workspace))
        lend_environment(workspace)
    git(workspace, "fetch", "--quiet", "origin")
    name = ref.removeprefix("refs/heads/")
    known = git(workspace, "rev-parse", "--verify", "--quiet", f"origin/{name}", check=False)
    git(workspace, "checkout", "--quiet", "--detach", known or ref)


def lend_environment(workspace: Path) -> None:
    """.venv with the running environment's content, stamped as `make setup` does when there is nothing left to do."""
    real, target = Path(sys.prefix), workspace / ".venv"
    target.mkdir()
    shutil.copy(real / "pyvenv.cfg", target)
    for item in real.iterdir():
        if item.name != "pyvenv.cfg" and not item.name.startswith("."):
            (target / item.name).symlink_to(item)
    # Without them it would install this clone into the environment that everything else runs in.
    for stamp, source in (("installed", "requirements.lock"), ("project", "pyproject.toml")):
        digest = hashlib.sha256((workspace / source).read_bytes()).hexdigest()
        (target / f".{stamp}-{digest[:16]}").touch()


def upload(source: Path, artifact: Path) -> None:
    """What upload-artifact keeps: no hidden files, and no name that a Windows disk could not hold."""
    if not source.exists():
        raise ValueError(f"{source}: nothing to keep")
    shutil.rmtree(artifact, ignore_errors=True)
    shutil.copytree(source, artifact, ignore=lambda folder, names: [name for name in names if name.startswith(".")])
    for path in [artifact, *artifact.rglob("*")]:
        if REFUSED_NAME.search(path.name):
            raise ValueError(f"an artifact cannot hold {path.name}")


def git(folder: Path, *arguments: str, check: bool = True) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, timeout=60)
    if check and done.returncode:
        raise AssertionError(f"git {' '.join(arguments)}: {done.stderr}")
    return done.stdout.strip()


@contextlib.contextmanager
def on_path(folder: Path, name: str, script: str) -> Iterator[str]:
    """A program of that name in a folder to put before PATH."""
    folder.mkdir()
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)
    yield f"{folder}:"
