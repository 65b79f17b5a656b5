"""Cluster: one site a file, what it has and how a job gets onto it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.base import Strict

HardwareKey = Literal[
    "cpu", "h100", "h200", "b200", "b300", "gb200", "gb300", "mi300x", "mi325x", "mi355x", "rtx6000pro"
]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Gpu(Strict):
    """The accelerators of one node; all nodes of a cluster are alike."""

    type: str = Field(min_length=1, description="Vendor's name, as the driver reports it.")
    vendor: Literal["nvidia", "amd"] = Field(description="Whose driver and visibility variable apply.")
    count_per_node: int = Field(gt=0, description="GPUs in one node.")
    memory_gib: float = Field(gt=0, description="Memory of one GPU, in GiB.")


class Node(Strict):
    """One node without its accelerators."""

    dram_gib: float = Field(gt=0, description="Memory, in GiB.")
    disk_gib: float = Field(gt=0, description="Node-local disk that a job may fill, in GiB.")


class Slurm(Strict):
    """What sbatch must be told at this site."""

    partition: str | None = Field(default=None, description="Partition; null is the site's default.")
    role_partitions: dict[Literal["prefill", "decode"], str] = Field(
        default_factory=dict,
        description="Partition of a role's nodes where it is another one; the job is then a heterogeneous one.",
    )
    account: str | None = Field(default=None, description="Account to charge.")
    qos: str | None = Field(default=None, description="Quality of service.")
    constraint: str | None = Field(default=None, description="Node feature expression.")
    time_limit_min: int = Field(default=240, gt=0, description="Wall-clock limit of a job, in minutes.")
    exclude: tuple[str, ...] = Field(default=(), description="Nodes that must not be used.")
    exclusive: bool = Field(default=True, description="Ask for whole nodes.")
    segment: int | None = Field(default=None, gt=0, description="Nodes that must share one network block.")
    gpu_request: Literal["gpus-per-node", "gres", "none"] = Field(
        default="gpus-per-node", description="How GPUs are asked for; none where whole nodes come with theirs."
    )
    memory_gib: float | None = Field(
        default=None, gt=0, description="Memory of a job on each node, in GiB; null is all of a node that is exclusive."
    )
    directives: dict[str, str] = Field(
        default_factory=dict,
        description="Further sbatch options of the site, e.g. {comment: bench}; '' is a bare flag.",
    )
    warning_s: int = Field(
        default=60, ge=10, description="Seconds before the time limit at which the job keeps what it has and ends."
    )
    pending_deadline_min: float | None = Field(
        default=None, gt=0, description="Minutes a job may wait for nodes before it is given up; null is for ever."
    )
    max_jobs: int = Field(default=8, gt=0, description="Jobs of one sweep that are in the queue or run at a time.")
    retries: int = Field(
        default=1, ge=0, le=5, description="Times a job is submitted again after a failure that was not its own."
    )


class Paths(Strict):
    """Where things lie; relative paths start at the repository's root. Left out of the fingerprint."""

    shared: str = Field(min_length=1, description="Folder every node sees: staged weights, images, results.")
    node_local: str = Field(min_length=1, description="Folder on each node's own disk; may equal shared.")
    models: str | None = Field(
        default=None, min_length=1, description="Folder of checkpoints that are there already; null is shared/models."
    )


class Mount(Strict):
    """One bind mount."""

    source: str = Field(min_length=1, description="Absolute path on the host.")
    target: str = Field(min_length=1, description="Absolute path in the container.")
    read_only: bool = Field(default=True, description="The container cannot write there.")


class Container(Strict):
    """How a role's image is run; without it every role runs in this environment."""

    runtime: Literal["none", "pyxis", "enroot", "docker", "podman", "apptainer"] = Field(
        description="Container runtime."
    )
    mounts: tuple[Mount, ...] = Field(default=(), description="Mounts beside the run folder and the weights.")


class PortRange(Strict):
    """Ports a job may bind. Left out of the fingerprint."""

    first: int = Field(ge=1024, le=65535, description="First port of the range.")
    last: int = Field(ge=1024, le=65535, description="Last port of the range, included.")


class Cluster(Strict):
    """One site: configs/clusters/<name>.yaml."""

    schema_version: Literal[1] = Field(alias="schema", description="Version of this file format.")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", description="Name used in matrices; equals the file name.")
    description: str = Field(default="", description="One line for people.")
    hardware: HardwareKey = Field(description="InferenceX's hardware key, written to every row as hw.")
    executor: Literal["local", "slurm"] = Field(description="local starts plain processes on this machine.")
    nodes: int = Field(gt=0, description="Most nodes one job may use.")
    gpu: Gpu | None = Field(default=None, description="Accelerators of a node; null is a CPU cluster.")
    node: Node = Field(description="Memory and disk of a node.")
    slurm: Slurm | None = Field(default=None, description="Required by executor: slurm.")
    paths: Paths = Field(description="Folders of this site.")
    container: Container = Field(default=Container(runtime="none"), description="Container runtime and mounts.")
    rdma_devices: tuple[str, ...] = Field(default=(), description="RDMA devices in GPU order, e.g. mlx5_0.")
    rdma_registration_pages: int | None = Field(
        default=None,
        gt=0,
        description="Pages one RDMA device can hold registered, over all regions; null is no known limit.",
    )
    env: dict[EnvName, str] = Field(
        default_factory=dict,
        description="Variables the site's libraries demand, e.g. UCX_NET_DEVICES. Never secrets.",
    )
    port_range: PortRange = Field(description="Ports that roles bind.")

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one node; 0 on a CPU cluster."""
        return self.gpu.count_per_node if self.gpu else 0
