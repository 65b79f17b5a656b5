"""A role's command line inside its image, for every container runtime, built here and nowhere else.

The process writes as the user who submitted the job, sees its own GPUs, and leaves no container behind: what has to be
removed afterwards has a name that holds the job's own id.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs.job import JobSpec, ProcessSpec
from runners.plan import mounts

IMAGE_SUFFIXES = (".sif", ".sqsh")


@dataclass(frozen=True)
class Wrapped:
    """How a role is started on its node.

    ``srun`` are options of its step, ``argv`` the command line on the node, ``cleanup`` what must run when all of it is
    gone, ``python`` the interpreter that the warden runs under there."""

    srun: tuple[str, ...]
    argv: tuple[str, ...]
    cleanup: tuple[str, ...] = ()
    python: str | None = None


def wrap(spec: JobSpec, process: ProcessSpec, argv: Sequence[str], env: Mapping[str, str], *, label: str) -> Wrapped:
    """``argv`` with exactly ``env`` added, in the process's image if it has one. ``label`` is unique to this start."""
    runtime = str((spec.cluster_profile.get("container") or {}).get("runtime", "none"))
    assigned = tuple(f"{name}={value}" for name, value in sorted(env.items()))
    if process.image is None:
        # env(1) rather than the step's environment: Slurm sets the GPU mask of a step itself.
        return Wrapped((), ("env", *assigned, *argv))
    binds = [f"{m['source']}:{m['target']}" + (":ro" if m["read-only"] else "") for m in mounts(spec, process)]
    cwd = spec.resolve(process.cwd)
    if runtime == "pyxis":
        step = (
            f"--container-image={process.image}",
            f"--container-mounts={','.join(binds)}",
            f"--container-workdir={cwd}",
            "--no-container-mount-home",
            "--no-container-remap-root",
        )
        return Wrapped(step, ("env", *assigned, *argv), python="python3")
    if runtime in ("docker", "podman"):
        return _docker(runtime, spec, process, argv, assigned, binds, cwd, label)
    if runtime == "apptainer":
        image = process.image
        if "://" not in image and not image.endswith(IMAGE_SUFFIXES) and not image.startswith("/"):
            image = f"docker://{image}"
        flags = ("--no-home", "--pwd", cwd, *_pairs("--bind", binds), *_pairs("--env", assigned))
        return Wrapped((), ("apptainer", "exec", *flags, *_apptainer_gpus(spec, process), image, *argv))
    if runtime == "enroot":
        options = (*_pairs("--mount", [_enroot_mount(bind) for bind in binds]), *_pairs("--env", assigned))
        return Wrapped((), ("enroot", "start", *options, process.image, *argv))
    raise ValueError(f"{process.name} has an image, but cluster {spec.cluster} has no container runtime")


def _docker(
    runtime: str,
    spec: JobSpec,
    process: ProcessSpec,
    argv: Sequence[str],
    assigned: Sequence[str],
    binds: Sequence[str],
    cwd: str,
    label: str,
) -> Wrapped:
    name = f"baton-{label}-{process.name}"
    # podman knows keep-id only where it runs as an ordinary user, for whom --user would be somebody else outside.
    rootless = runtime == "podman" and os.getuid() != 0
    options = (
        *("--rm", "--init", "--name", name, "--network", "host", "--ipc", "host"),
        *(("--userns=keep-id",) if rootless else ("--user", f"{os.getuid()}:{os.getgid()}")),
        *_docker_rdma(spec),
        *("--workdir", cwd, "--entrypoint", argv[0]),
        *_pairs("--volume", binds),
        *_pairs("--env", assigned),
        *_docker_gpus(runtime, spec, process),
    )
    # A client that is killed leaves its container: the daemon is told, by the name that only this job has.
    return Wrapped((), (runtime, "run", *options, str(process.image), *argv[1:]), (runtime, "rm", "--force", name))


def _docker_rdma(spec: JobSpec) -> tuple[str, ...]:
    """The cards, and the right to register as much memory as they are to see."""
    if not spec.cluster_profile.get("rdma-devices"):
        return ()
    return ("--device", "/dev/infiniband", "--cap-add", "IPC_LOCK", "--ulimit", "memlock=-1")


def _docker_gpus(runtime: str, spec: JobSpec, process: ProcessSpec) -> tuple[str, ...]:
    if not process.gpus:
        return ()
    if spec.cluster_profile["gpu"]["vendor"] == "amd":
        return ("--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "video", "--group-add", "render")
    # The mask variable in the environment selects among all, as it does without a container.
    return ("--device", "nvidia.com/gpu=all") if runtime == "podman" else ("--gpus", "all")


def _apptainer_gpus(spec: JobSpec, process: ProcessSpec) -> tuple[str, ...]:
    if not process.gpus:
        return ()
    return ("--rocm",) if spec.cluster_profile["gpu"]["vendor"] == "amd" else ("--nv",)


def _enroot_mount(bind: str) -> str:
    source, target, *options = bind.split(":")
    return f"{source}:{target}:none:x-create=auto,rbind" + (",ro" if options else "")


def _pairs(flag: str, values: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for value in values for word in (flag, value))
