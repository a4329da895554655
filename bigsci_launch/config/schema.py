"""The run file: every key, its unit and its meaning. The JSON Schema and the manual are made from these docstrings.

Values are validated one by one here, in strict JSON mode (`"4"` is not an integer). Rules across sections are in
`check`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from bigsci_launch.config.guard_schema import FaultSpec, GuardsSection
from bigsci_launch.config.section import Section
from bigsci_launch.topology import AXES, Topology
from bigsci_launch.units import format_slurm_duration, parse_slurm_duration


def _slurm_duration(value: Any) -> Any:
    if isinstance(value, str):
        seconds = parse_slurm_duration(value)
        if seconds == 0:
            raise ValueError("to Slurm, zero means no limit at all: write a limit")
        return format_slurm_duration(seconds)
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError("a bare number is ambiguous: write HH:MM:SS or D-HH:MM:SS")
    return value


SlurmDuration = Annotated[str, BeforeValidator(_slurm_duration)]
# One word of an sbatch header line. A space or a newline in it would start another option.
Word = Annotated[str, Field(pattern=r"^\S+$")]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class RunSection(Section):
    """The run's name, where it is stored, and what it runs."""

    name: RunName
    """Name of the run, of its directory under `root`, and of its Slurm jobs. Submitting the name again adds an
    attempt."""

    root: str = "runs"
    """Folder for run directories. A relative path starts at the folder in which `bsl` is called."""

    seed: NonNegativeInt = 1234
    """Seed of initialisation, dropout and data order."""

    command: list[str] | None = None
    """The program that every rank runs; default: `bsl train`. Its environment contains RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT, BSL_RUN_DIR and BSL_ATTEMPT."""


class SlurmSection(Section):
    """What the job requests from the scheduler. If a key is left out, the site's value applies."""

    site: str = "local"
    """Name of a site file (`bsl config sites` lists them), or a path to one, relative to the run file."""

    nodes: PositiveInt = 1
    """Number of nodes. It has no effect on a local site."""

    time_limit: SlurmDuration | None = None
    """Longest time of one job, HH:MM:SS or D-HH:MM:SS."""

    partition: Word | None = None
    """Partition; default: the site's default partition."""

    account: Word | None = None
    """Account to charge."""

    qos: Word | None = None
    """Quality of service."""

    reservation: Word | None = None
    """Reservation to run in."""

    constraint: Word | None = None
    """Node features that are required."""

    exclude: Word | None = None
    """Nodes that must not be used, as a Slurm hostlist."""

    nodelist: Word | None = None
    """Nodes that must be used, as a Slurm hostlist."""

    requeue: bool = False
    """Whether Slurm may restart the job automatically after a node failure (`--requeue`)."""

    wait_s: NonNegativeInt = 60
    """Seconds that ranks may run after the first has ended with 0 (`srun --wait`); 0: no limit. Then they are killed as
    hung: raise it if a rank has long work to do after the others, such as a last upload."""


class ParallelismSection(Section):
    """How the model is split over the ranks. In rank order, tensor varies fastest, then context, expert, data,
    pipeline. The product of the five sizes is the world size."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks that share every layer (tp)."""

    pipeline_parallel_size: PositiveInt = 1
    """Stages of the pipeline (pp)."""

    data_parallel_size: PositiveInt | None = None
    """Replicas (dp); default: world size / (tp x cp x ep x pp). A local site starts tp x cp x ep x pp x dp ranks;
    there, the default makes that the site's `ranks_per_node`."""

    context_parallel_size: PositiveInt = 1
    """Ranks that share every sequence (cp), for a program in `run.command`. `bsl train` does not split sequences."""

    expert_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a layer (ep), for a program in `run.command`. `bsl train` has no experts. Leave
    it at 1 if the program spreads experts over the data-parallel ranks, since ep is then not a separate axis."""

    partition_method: str = "type:transformer|embedding"
    """How layers are distributed over stages. DeepSpeed's methods are `uniform`, `parameters`, and `type:REGEX` over
    layer class names. Two methods use the prices of `bsl plan`, including embeddings and head: `time` minimises the
    time of the slowest stage, `memory` the memory of the fullest. `bsl submit` records the resulting cut as
    `time:7,6,6,5`, which can also be given."""

    def topology(self, num_ranks: int) -> Topology:
        """Return the sizes as a topology. If dp is left out, it is what `num_ranks` ranks allow, at least 1."""
        sizes = {axis.name: getattr(self, axis.key) for axis in AXES}
        given = Topology(**{axis: size or 1 for axis, size in sizes.items()})
        return given if sizes["dp"] else given.resized(dp=max(1, num_ranks // given.world_size))


Positions = Literal["learned", "rotary", "alibi"]


class ModelSection(Section):
    """A GPT. Sizes are counts of elements."""

    num_layers: PositiveInt
    """Transformer layers."""

    hidden_size: PositiveInt
    """Width of the residual stream."""

    num_attention_heads: PositiveInt
    """Attention heads; must divide `hidden_size` and be divisible by tp."""

    ffn_hidden_size: PositiveInt | None = None
    """Width of the MLP; default: 4 x `hidden_size`."""

    sequence_length: PositiveInt
    """Tokens per sample."""

    vocab_size: PositiveInt
    """Tokens in the vocabulary, before padding."""

    vocab_size_multiple: PositiveInt = 128
    """The vocabulary is padded to a multiple of this times tp. Padding never takes part in the loss."""

    positions: Positions = "learned"
    """How the model encodes positions. `learned`: a vector for each, in a separate layer. `rotary`: queries and keys
    are rotated, which needs an even head width. `alibi`: attention scores fall with distance, as in BLOOM."""

    tied_embeddings: bool = True
    """Whether the output layer shares its weight with the word embedding."""

    embedding_norm: bool = False
    """Whether a layer norm follows the embeddings, as in BLOOM. It is a separate layer, so that no stage has a copy."""

    dropout: Fraction = 0.0
    """Dropout probability in attention output and MLP output."""

    layernorm_epsilon: PositiveFloat = 1e-5
    """Epsilon of every layer norm."""

    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""

    declared_parameters: str | None = None
    """The size that people quote, such as `176B`. `bsl plan` compares it with the computed number of parameters."""


class RampupSection(Section):
    """Batch-size ramp-up in Megatron's terms."""

    start: PositiveInt
    """First global batch size, samples."""

    increment: PositiveInt
    """Samples added at each step of the ramp; divides `global_batch_size - start`."""

    samples: PositiveInt
    """Samples until the ramp ends."""


class TrainingSection(Section):
    """The length of the run and the sizes of its batches."""

    steps: PositiveInt
    """Optimizer steps of the whole run."""

    micro_batch_size: PositiveInt
    """Samples of one micro batch on one data-parallel rank."""

    global_batch_size: PositiveInt
    """Samples of one optimizer step over all replicas."""

    rampup: RampupSection | None = None
    """Batch-size ramp-up; default: none."""

    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Number format of the weights used for computing. bf16 keeps fp32 masters and accumulates gradients in fp32. fp16
    keeps fp32 masters and uses dynamic loss scaling; it needs a GPU."""

    activation_checkpointing: bool = False
    """Whether the activations of transformer layers are recomputed in the backward pass."""

    stop_after_steps: PositiveInt | None = None
    """End each attempt with a checkpoint after this many of its own steps, as if it had been asked to stop."""


class OptimizerSection(Section):
    """AdamW with ZeRO stage 1, cosine decay with linear warm-up."""

    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""

    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""

    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from zero."""

    decay_steps: PositiveInt | None = None
    """Step at which the cosine reaches `min_learning_rate`; default: `training.steps`."""

    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """Decay rates of the two moments."""

    epsilon: PositiveFloat = 1e-8
    """Term added to the denominator."""

    weight_decay: NonNegativeFloat = 0.1
    """Decay of matrices; biases and norms are never decayed."""

    clip_grad: NonNegativeFloat = 1.0
    """Maximum gradient norm over the whole model; 0 turns clipping off."""


class DataSection(Section):
    """Where the tokens come from."""

    prefix: str
    """Path of Megatron's indexed dataset without `.bin`/`.idx`; `bsl data prepare` makes one."""

    held_out: Fraction = 0.0
    """Share of the samples, taken from the end of the dataset, that is kept for evaluation and never trained on."""


class CheckpointSection(Section):
    """When to save and what to start from."""

    save_interval: PositiveInt | None = None
    """Steps between checkpoints; default: only at the end and when asked to stop."""

    keep_last: PositiveInt | None = None
    """How many of the newest checkpoints to keep; default: all. Older ones are deleted after a save, except the last
    verified one and those that are pinned or half verified (`bsl checkpoint`)."""

    load: str = "auto"
    """`auto`: the newest checkpoint of the run, if it has one. `none`: start at step 0. Otherwise the path of a
    checkpoint folder that has a checkpoint: the run starts from it, and resumes from its own once it has any."""


class MonitorSection(Section):
    """What the run records for people, and when."""

    peak_tflops_per_rank: PositiveFloat | None = None
    """Peak TFLOP/s of one rank's device, used to show utilisation; default: the site's."""

    dump_weights_steps: list[PositiveInt] = []
    """Steps before and after which every rank dumps its weights for `bsl diff-weights`."""

    exit_margin_s: PositiveInt | None = None
    """Seconds before the time limit at which ranks are told to save and stop (`--signal`); default: computed."""

    save_time_s: PositiveFloat = 60.0
    """Expected seconds of one save; part of the exit margin."""

    eval_interval: PositiveInt | None = None
    """Steps between evaluations; default: no evaluation. `bsl train` evaluates on `data.held_out`. If the step also has
    a save, that comes first."""

    eval_batches: PositiveInt = 4
    """Global batches per evaluation of `bsl train`. The samples are the same each time."""

    eval_time_s: NonNegativeFloat = 0.0
    """Expected seconds of one evaluation."""

    step_time_s: PositiveFloat = 120.0
    """Expected seconds of one step; part of the exit margin."""


class EnvironmentVariable(Section):
    """A variable of the ranks' environment, with the reason why it is set."""

    value: str
    """The value. It is quoted, so the shell does not expand it."""

    reason: str
    """Why it is set. The job script prints this as a comment above the export."""


class RunConfig(Section):
    """A run file. Layers, weakest first: defaults below, the site, `extends`, this file, `--set key=value`."""

    run: RunSection
    slurm: SlurmSection = SlurmSection()
    parallelism: ParallelismSection = ParallelismSection()
    model: ModelSection
    training: TrainingSection
    optimizer: OptimizerSection = OptimizerSection()
    data: DataSection
    checkpoint: CheckpointSection = CheckpointSection()
    monitor: MonitorSection = MonitorSection()
    guards: GuardsSection = GuardsSection()
    env: dict[EnvironmentName, EnvironmentVariable] = {}
    """Variables of the ranks' environment, by name. They override the site's."""
    faults: list[FaultSpec] = []
    """Faults and defects to inject. Empty in a real run."""

    def topology(self, ranks_per_node: int) -> Topology:
        """Return the topology on `slurm.nodes` nodes with `ranks_per_node` ranks each.

        Raises:
            ValueError: the sizes multiply to another number of ranks.
        """
        world_size = self.slurm.nodes * ranks_per_node
        topology = self.parallelism.topology(world_size)
        if topology.world_size != world_size:
            raise ValueError(
                f"{self.slurm.nodes} nodes x {ranks_per_node} ranks = {world_size} ranks, "
                f"but {topology.product} = {topology.world_size}"
            )
        return topology

    @property
    def padded_vocab_size(self) -> int:
        """`vocab_size` rounded up to a multiple of `vocab_size_multiple` x tp (Megatron's rule)."""
        multiple = self.model.vocab_size_multiple * self.parallelism.tensor_parallel_size
        return -(-self.model.vocab_size // multiple) * multiple

    @property
    def ffn_hidden_size(self) -> int:
        return self.model.ffn_hidden_size or 4 * self.model.hidden_size


class Gpu(Section):
    """The accelerator of a site's nodes."""

    name: str
    """Marketing name."""

    memory_gib: PositiveFloat
    """Usable memory, GiB."""

    peak_tflops: PositiveFloat
    """Dense bf16 peak, TFLOP/s."""


class Partition(Section):
    """A Slurm partition of the site."""

    nodes: PositiveInt | None = None
    """Number of its nodes. If left out, the number of nodes of a run is not checked."""

    max_time: SlurmDuration | None = None
    """Its time limit. If left out, it has none."""


class Container(Section):
    """The container in which ranks run."""

    kind: Literal["pyxis", "apptainer"]
    """`pyxis`: srun's own options (`--container-image`). `apptainer`: `apptainer exec` before the program."""

    image: str
    """Image file or name."""

    mounts: list[str] = []
    """Bind mounts, `HOST[:CONTAINER]`."""


# Options that the header of the job script already has; `account`, `qos` and others have their own keys.
WRITTEN_BY_BSL = re.compile(
    r"--(account|array|chdir|comment|constraint|cpus-per-task|error|exclude|gres|job-name|nodelist|nodes|no-requeue"
    r"|ntasks|ntasks-per-node|open-mode|output|parsable|partition|qos|requeue|reservation|signal|time)"
)


class SiteConfig(Section):
    """Facts about one cluster. A person writes this file; `bsl` never guesses its values."""

    description: str
    """One line that describes the cluster."""

    scheduler: Literal["slurm", "local"]
    """`slurm`, or `local` for processes of this machine."""

    ranks_per_node: PositiveInt
    """GPUs per node, since each GPU has one task, which is one rank. On a CPU site: tasks per node. On a local site:
    the ranks of a run that leaves out `data_parallel_size`."""

    gpu: Gpu | None = None
    """The GPU. Leave it out on a CPU site."""

    cpus_per_rank: PositiveInt | None = None
    """CPUs of each task (`--cpus-per-task`)."""

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

    sbatch_options: list[Annotated[str, Field(pattern=r"^--[a-z][^\r\n]*$")]] = []
    """Additional sbatch options, such as `--hint=nomultithread`, except those that `bsl` sets itself."""

    activation: list[str] = []
    """Shell lines that make the software available: modules, conda, a virtual environment."""

    environment: dict[EnvironmentName, EnvironmentVariable] = {}
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

    @field_validator("sbatch_options")
    @classmethod
    def _are_free(cls, options: list[str]) -> list[str]:
        names = [re.split(r"[=\s]", option)[0] for option in options]
        taken = [name for name in names if WRITTEN_BY_BSL.fullmatch(name)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if taken:
            raise ValueError(f"`bsl` sets {', '.join(taken)} itself")
        if twice:
            raise ValueError(f"{', '.join(twice)} is given twice")
        return options
