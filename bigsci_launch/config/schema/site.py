"""The site file: facts about one cluster. Every key, its unit and its meaning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from bigsci_launch.config.schema.node import Container, ResourceLimits, StageIn
from bigsci_launch.config.schema.options import SbatchOptions, SrunOptions
from bigsci_launch.config.schema.section import Section
from bigsci_launch.config.schema.values import EnvironmentName, EnvironmentVariable, SlurmDuration, Word


class Gpu(Section):
    """The accelerator of a site's nodes. Figures that are left out are those of `slurm/hardware/gpus.yaml`; `bsl plan`
    lists those that it had to assume for a name that is not there."""

    name: str
    """Marketing name, such as `H100-SXM5-80GB`, or the name that CUDA or HIP gives."""

    memory_gib: PositiveFloat | None = None
    """Usable memory, GiB."""

    peak_tflops: PositiveFloat | None = None
    """Dense bf16 peak, TFLOP/s."""

    fp8_tflops: PositiveFloat | None = None
    """Dense fp8 peak, TFLOP/s."""

    hbm_tb_per_s: PositiveFloat | None = None
    """Nominal bandwidth of the GPU's memory, TB/s."""

    multiprocessors: PositiveInt | None = None
    """Streaming multiprocessors; on AMD, compute units."""

    nvlink_gb_per_s: PositiveFloat | None = None
    """Nominal GB/s that one GPU can send to the others of its node."""

    vendor: Literal["nvidia", "amd"] = "nvidia"
    """Whose driver a container needs: `apptainer exec --nv` or `--rocm`."""


class Partition(Section):
    """A Slurm partition of the site."""

    nodes: PositiveInt | None = None
    """Number of its nodes. If left out, the number of nodes of a run is not checked."""

    max_time: SlurmDuration | None = None
    """Its time limit. If left out, it has none."""


class SiteVariable(EnvironmentVariable):
    """A variable that every job on the site needs. It reaches everybody's jobs, so it needs a reason."""

    value: str | None = None
    """The value. It is quoted, so the shell does not expand it. The run directory stores it for you and your group."""

    reason: str
    """Why it is set. The job script has this as a comment above the export."""


class SiteConfig(Section):
    """Facts about one cluster, written by hand: `bsl` never guesses its values."""

    description: str
    """One line that describes the cluster."""

    scheduler: Literal["slurm", "local"]
    """`slurm`, or `local` for processes of this machine."""

    ranks_per_node: PositiveInt
    """GPUs per node, since each GPU has one rank. On a CPU site: ranks per node. On a local site: the ranks of a run
    that leaves out `data_parallel_size`."""

    gpu: Gpu | None = None
    """The GPU. Leave it out on a CPU site."""

    cpus_per_rank: PositiveInt | None = None
    """CPUs of each rank; a task has those of all its ranks (`--cpus-per-task`)."""

    gres: Word | None = None
    """Generic resource per node, such as `gpu:8` (`--gres`), if the site uses it."""

    partitions: dict[Word, Partition] = {}
    """Partitions by name. If none is listed, Slurm's default partition is used and nothing is checked."""

    default_partition: Word | None = None
    """The partition of runs that name none."""

    default_time_limit: SlurmDuration | None = None
    """The time limit of runs that name none."""

    reserve_nodes: NonNegativeInt = 0
    """Nodes of the partition that a run must leave free to replace failed ones."""

    account: Word | None = None
    """Default account."""

    qos: Word | None = None
    """Default quality of service."""

    reservation: Word | None = None
    """Default reservation."""

    constraint: Word | None = None
    """Default node features."""

    sbatch_options: SbatchOptions = []
    """Additional sbatch options, such as `--hint=nomultithread`, except those that `bsl` sets itself."""

    srun_options: SrunOptions = []
    """Additional options of the srun that starts the ranks, such as `--gpu-bind=none`, except those that `bsl` sets
    itself."""

    cpu_bind: Word | None = None
    """Which CPUs each rank of a node may use (`srun --cpu-bind`), such as `cores` or `mask_cpu:fe,fe00`."""

    ulimits: ResourceLimits = ResourceLimits()
    """Resource limits of every run; a run may override each."""

    stage_in: list[StageIn] = []
    """Files that are copied to every node before the ranks start (`sbcast`)."""

    master_addr_suffix: Word | None = None
    """Text after the first node's name in MASTER_ADDR, if its fast network has a name of its own, such as `i`."""

    nvlink_domain_nodes: PositiveInt = 1
    """Nodes whose GPUs are connected by one NVLink fabric. If more than 1, a tensor-parallel group may cross nodes of
    the same domain, and `--segment` keeps these nodes together."""

    network_gb_per_s: PositiveFloat | None = None
    """Nominal GB/s of all network adapters of a node together, in one direction: four of 200 Gb/s are 100."""

    network_taper: PositiveFloat = 1.0
    """How much more the nodes of a leaf switch can send than its links to other switches carry: 2 for a tree tapered
    2:1, 1 for a full tree, and for a rail-optimised one whose rings stay on their rails."""

    activation: list[str] = []
    """Shell lines that make the software available: modules, conda, a virtual environment."""

    environment: dict[EnvironmentName, SiteVariable] = {}
    """Variables that every job on the site needs, each with its reason."""

    container: Container | None = None
    """Container of the ranks, if they run in one."""

    network_interface: Word | None = None
    """Network interface for gloo and NCCL (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`), if the default is wrong."""

    calibration: str | None = None
    """File with the constants for `bsl plan`, relative to the site file. `bsl plan calibrate` makes one."""

    node_mtbf_h: PositiveFloat | None = None
    """Mean hours between failures of one node. A job on n nodes fails n times as often."""

    node_memory_gib: PositiveFloat | None = None
    """Host memory of a node in GiB that a job may use. `bsl plan --survive` keeps copies of optimizer shards there."""

    allocation_ends: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] | None = None
    """Last day on which the account may use the cluster, YYYY-MM-DD."""

    @field_validator("default_partition")
    @classmethod
    def _is_listed(cls, value: str | None, info: ValidationInfo) -> str | None:
        partitions = info.data.get("partitions")
        if value is not None and partitions is not None and value not in partitions:
            raise ValueError(f"must be one of `partitions`: {', '.join(partitions) or 'none is listed'}")
        return value
