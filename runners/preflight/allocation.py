"""The first seconds on a node: its readings against what the job needs. Pure; `runners.preflight.node` is the probe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from configs.job import JobSpec, ProcessSpec
from runners.finding import Finding
from runners.memory import MemoryUnknown, host_bytes, plan_memory
from runners.memory.tables import GIB, gib
from runners.preflight.readings import PROBE_BYTES, UNLIMITED, Readings
from runners.preflight.registry import error, warning

IDLE_DEVICE_BYTES = GIB  # what a driver keeps on an idle GPU is less
# Their torch finds the runtime that was installed with it, wherever the loader looks. TileRT opens it by name.
BRING_THEIR_RUNTIME = frozenset({"vllm", "sglang", "bundled"})
SHORT_DEVICE = 0.97  # of the stated memory: what a driver shows differs by some percent

EXCLUDED = error(code="node-excluded", phase="allocation", description="a node that the site's file excludes")
RESTARTED = error(
    code="job-restarted",
    phase="allocation",
    description="Slurm has requeued the job and runs it a second time: its first half is lost and nobody is told",
    seen="submitit",
)
DEVICES = error(
    code="device-count",
    phase="allocation",
    description="the node shows fewer GPUs, or smaller ones, than the site's file says",
)
DEVICES_UNREAD = error(
    code="devices-unreadable",
    phase="allocation",
    description="the vendor's tool does not answer: driver or container hook is missing",
    seen="InferenceX #2533",
)
BUSY = error(
    code="gpu-memory-busy",
    phase="allocation",
    description="a GPU has less memory free than the plan needs",
    seen="InferenceX #3330: fits on one node, not on its neighbour",
)
FOREIGN = error(
    code="gpu-foreign-process",
    phase="allocation",
    description="somebody's process, or a container that was left over, is on a GPU of a free node",
    seen="pegainfer",
)
RDMA_MISSING = error(
    code="rdma-device-missing",
    phase="allocation",
    description="a named RDMA device is not there, or /dev/infiniband is not visible",
    seen="InferenceX #2533",
)
RDMA_INACTIVE = error(
    code="rdma-port-inactive",
    phase="allocation",
    description="the port of an RDMA device is not ACTIVE",
    seen="InferenceX #2533",
)
RDMA_GID = error(
    code="rdma-gid-missing",
    phase="allocation",
    description="an RDMA device has no address (GID) that another node can reach",
    seen="InferenceX #2533",
)
MEMLOCK = error(
    code="memlock-limited",
    phase="allocation",
    description="the limit on locked memory is below what the hand-off registers",
    seen="InferenceX #2533",
)
THP = error(
    code="huge-pages-off",
    phase="allocation",
    description="transparent huge pages are off: a large registration needs a page-table entry for each 4 KiB",
    seen="InferenceX #3330",
)
THP_PARTIAL = warning(
    code="huge-pages-partial",
    phase="allocation",
    description="a fresh region is not wholly on 2 MiB pages; one hole makes the whole registration small-paged",
    seen="InferenceX #3330",
)
POPULATE = warning(
    code="populate-write-missing",
    phase="allocation",
    description="the kernel has no MADV_POPULATE_WRITE: touching 100 GiB page by page took 149 s",
    seen="InferenceX #3330",
)
NODE_MEMORY = error(
    code="node-memory-short",
    phase="allocation",
    description="the node has less memory free than pinned buffers, pools and runtimes need",
)
PORT = error(
    code="port-not-bindable",
    phase="allocation",
    description="a port of the job is held by somebody on this node",
    seen="pegainfer",
)
NCCL = error(
    code="nccl-version",
    phase="allocation",
    description="the NCCL that would be loaded is not the one that the engine was built against",
    seen="pegainfer",
)
RUNTIME_LIBRARY = error(
    code="gpu-runtime-missing",
    phase="allocation",
    description="no CUDA or HIP runtime can be loaded by any of its names",
    seen="InferenceX #3330",
)
PATH = error(
    code="path-absent-on-node",
    phase="allocation",
    description="the node does not see the repository, the run folder, the weights or the shared folder",
    seen="submitit",
)
PROGRAM = error(
    code="program-absent-on-node",
    phase="allocation",
    description="the node lacks the site's container runtime or srun",
    seen="InferenceX",
)


def judge(spec: JobSpec, readings: Readings, node: int = 0) -> list[Finding]:
    """What is wrong with a node for its processes of the job. ``node`` is its index in the allocation."""
    here = [process for process in spec.processes if process.node == node]
    where = f"node {node} ({readings.hostname})"
    return [
        *_job(spec, readings, where),
        *_gpus(spec, here, readings, where, node),
        *_rdma(spec, here, readings, where),
        *_pages(spec, here, readings, where),
        *_memory(spec, readings, where, node),
        *_software(spec, here, readings, where),
    ]


def _job(spec: JobSpec, readings: Readings, where: str) -> Iterator[Finding]:
    excluded = (spec.cluster_profile.get("slurm") or {}).get("exclude") or []
    if readings.hostname in excluded:
        fix = "slurm.exclude reaches sbatch as --exclude; submit again"
        yield EXCLUDED.at(where, f"{readings.hostname} is excluded by {spec.cluster}", fix)
    if readings.restart_count:
        message = f"this is start {readings.restart_count + 1} of the job"
        yield RESTARTED.at(where, message, "submit it again with --no-requeue")
    for path in readings.missing_paths:
        yield PATH.at(where, f"{path} is not there", "use folders that every node mounts, and stage the weights")
    for program in readings.missing_programs:
        yield PROGRAM.at(where, f"{program} is not there", "choose nodes that have it, or correct container.runtime")


def _gpus(spec: JobSpec, here: Sequence[ProcessSpec], readings: Readings, where: str, node: int) -> Iterator[Finding]:
    gpu = spec.cluster_profile.get("gpu")
    used = sorted({index for process in here for index in process.gpus})
    if not gpu or not used:
        return
    if readings.devices is None:
        tool = "nvidia-smi" if gpu["vendor"] == "nvidia" else "rocm-smi"
        message = f"{tool} does not answer"
        yield DEVICES_UNREAD.at(where, message, f"run {tool} on the node; in a container the driver must be mounted")
        return
    devices = {device.index: device for device in readings.devices}
    stated = int(float(gpu["memory-gib"]) * GIB)
    missing = [index for index in used if index not in devices]
    if missing:
        message = f"GPUs {missing} are not there; {len(devices)} are"
        yield DEVICES.at(where, message, "drain the node, or correct gpu.count-per-node in the cluster's file")
    needs = _needs(spec, here)
    for index in used:
        device = devices.get(index)
        if device is None:
            continue
        if device.total_bytes < SHORT_DEVICE * stated:
            message = f"GPU {index} ({device.name}) has {gib(device.total_bytes):.2f} GiB, the site's file says more"
            yield DEVICES.at(where, message, f"correct gpu.memory-gib, now {gpu['memory-gib']}")
        need = needs.get(index, 0)
        if device.free_bytes < need:
            message = f"GPU {index} has {gib(device.free_bytes):.2f} GiB free, the plan needs {gib(need):.2f}"
            yield BUSY.at(where, message, "free the GPU, exclude the node, or lower max-model-len")
    for process in readings.processes:
        if process.used_bytes >= IDLE_DEVICE_BYTES // 16:
            message = f"pid {process.pid} ({process.name}) holds {gib(process.used_bytes):.2f} GiB of GPU memory"
            yield FOREIGN.at(
                where, message, "end it if it is yours (a container that was left over?), else exclude the node"
            )
    held = [d for d in devices.values() if d.total_bytes - d.free_bytes > IDLE_DEVICE_BYTES and d.index in used]
    if held and not readings.processes:
        message = (
            f"GPU {held[0].index} has {gib(held[0].total_bytes - held[0].free_bytes):.2f} GiB in use by nobody seen"
        )
        yield FOREIGN.at(where, message, "look for containers of others on the node, or exclude it")


def _needs(spec: JobSpec, here: Sequence[ProcessSpec]) -> dict[int, int]:
    """GPU index -> bytes that the plan needs free there, the driver's own share left out."""
    try:
        plan = plan_memory(spec)
    except MemoryUnknown:
        return {}
    needs: dict[int, int] = {}
    share = plan.longest_prompt / plan.context  # of a full context, which the peak is planned for
    for process in here:
        for table in plan.tables:
            if table.process != process.name:
                continue
            reserve = sum(term.bytes for term in table.resident if term.kind == "reserve")
            first, _, last = table.ranks.rpartition(" ")[2].partition("-")
            for rank in range(int(first), int(last or first) + 1):
                if rank < len(process.gpus):
                    held = table.resident_bytes - (0 if table.taken_bytes else reserve)
                    needs[process.gpus[rank]] = held + int(share * (table.peak_bytes - table.resident_bytes))
    return needs


def _rdma(spec: JobSpec, here: Sequence[ProcessSpec], readings: Readings, where: str) -> Iterator[Finding]:
    wanted = spec.cluster_profile.get("rdma-devices") or []
    moves = any(process.role in ("prefill", "decode") for process in here)
    if spec.handoff.protocol == "tcp" or spec.handoff.transport == "none" or not moves or not wanted:
        return
    found = {device.name: device for device in readings.rdma}
    missing = [name for name in wanted if name not in found]
    if missing or not readings.infiniband_nodes:
        message = f"missing: {', '.join(missing) or '/dev/infiniband'}; there are: {', '.join(found) or 'none'}"
        yield RDMA_MISSING.at(where, message, "correct rdma-devices, or mount /dev/infiniband into the container")
    for name in wanted:
        device = found.get(name)
        if device is not None and "ACTIVE" not in device.state:
            yield RDMA_INACTIVE.at(where, f"{name} is {device.state}", "exclude the node, or leave the device out")
        elif device is not None and not device.gids:
            yield RDMA_GID.at(where, f"{name} has no GID", "exclude the node: its network is not configured")
    need = _registered(spec, here)
    runtime = (spec.cluster_profile.get("container") or {}).get("runtime")
    lifted = runtime in ("docker", "podman") and all(process.image for process in here)  # they are started without one
    if not lifted and readings.memlock_bytes != UNLIMITED and readings.memlock_bytes < need:
        message = f"ulimit -l is {readings.memlock_bytes >> 10} KiB, {need >> 10} KiB are registered"
        yield MEMLOCK.at(where, message, "raise LimitMEMLOCK of slurmd to infinity, or ulimit -l in the container")


def _registered(spec: JobSpec, here: Sequence[ProcessSpec]) -> int:
    try:
        plan = plan_memory(spec)
    except MemoryUnknown:
        return 0
    names = {process.name for process in here}
    return max((item.bytes for item in plan.registrations if item.process in names), default=1 << 20)


def _pages(spec: JobSpec, here: Sequence[ProcessSpec], readings: Readings, where: str) -> Iterator[Finding]:
    limit = spec.cluster_profile.get("rdma-registration-pages")
    need = _registered(spec, here)
    if not limit or spec.handoff.protocol == "tcp" or need <= limit * 4096:
        return
    if readings.huge_pages_enabled not in ("always", "madvise"):
        message = f"transparent_hugepage/enabled is {readings.huge_pages_enabled or 'unreadable'}"
        yield THP.at(
            where, message, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (needs the site's admin)"
        )
    elif readings.huge_probe_bytes is not None and readings.huge_probe_bytes < PROBE_BYTES:
        message = f"{readings.huge_probe_bytes >> 20} of {PROBE_BYTES >> 20} MiB came on 2 MiB pages"
        fix = "set transparent_hugepage/defrag to madvise, or free memory (drop caches) on the node"
        yield THP_PARTIAL.at(where, message, fix)
    if not readings.populate_write:
        message = "the kernel is older than 5.14"
        yield POPULATE.at(where, message, "raise readiness-timeout-s by 1.5 s for each GiB of buffer")


def _memory(spec: JobSpec, readings: Readings, where: str, node: int) -> Iterator[Finding]:
    try:
        need = host_bytes(spec, node)
    except MemoryUnknown:
        return
    if readings.available_bytes is not None and readings.available_bytes < need:
        message = f"{gib(readings.available_bytes):.1f} GiB are available, {gib(need):.1f} GiB are needed"
        yield NODE_MEMORY.at(where, message, "end what else runs there, or lower pools and caches in the recipe")
    for port in readings.taken_ports:
        yield PORT.at(where, f"port {port} is held", "end what holds it (ss -ltnp), or move port-range")


def _software(spec: JobSpec, here: Sequence[ProcessSpec], readings: Readings, where: str) -> Iterator[Finding]:
    wanted = spec.versions.get("nccl")
    plain = [process for process in here if process.gpus and process.image is None]
    if wanted and readings.nccl_version and readings.nccl_version != wanted and plain:
        message = f"libnccl.so.2 is {readings.nccl_version}, the engine was built against {wanted}"
        yield NCCL.at(where, message, "put that NCCL first on LD_LIBRARY_PATH (nccl-root in the role's args)")
    opens = [process for process in plain if process.engine not in BRING_THEIR_RUNTIME or "tilert" in process.argv]
    if opens and not readings.runtime_libraries:
        message = f"neither libcudart nor libamdhip64 can be loaded; {opens[0].name} needs one"
        yield RUNTIME_LIBRARY.at(where, message, "load the site's CUDA or ROCm module, or give the role an image")
