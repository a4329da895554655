"""The run file: every key, its unit and its meaning. The docstrings here are the JSON Schema and the manual.

Values are validated one by one here; rules that span sections are in `check`. Strict JSON mode: `"4"` is no integer.
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
            raise ValueError("zero means no limit at all to Slurm: write a limit")
        return format_slurm_duration(seconds)
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError("a bare number is ambiguous: write HH:MM:SS or D-HH:MM:SS")
    return value


SlurmDuration = Annotated[str, BeforeValidator(_slurm_duration)]
# One word of an sbatch header line: a space or a newline in it would begin another option.
Word = Annotated[str, Field(pattern=r"^\S+$")]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class RunSection(Section):
    """What the run is called and where it lives."""

    name: RunName
    """Name of the run: its directory under `root` and its Slurm job name. The same name again adds an attempt."""

    root: str = "runs"
    """Folder that holds run directories; a relative path is relative to where `bsl` is called."""

    seed: NonNegativeInt = 1234
    """Seed of initialisation, dropout and data order."""

    command: list[str] | None = None
    """The program that every rank runs; default: `bsl train`. It finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT in its environment, and BSL_RUN_DIR and BSL_ATTEMPT."""


class SlurmSection(Section):
    """What is asked of the scheduler. Site values apply where a key is left out."""

    site: str = "local"
    """Name of a site file (`bsl config sites` lists them), or a path to one, relative to the run file."""

    nodes: PositiveInt = 1
    """Number of nodes; without effect on a local site."""

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
    """Whether Slurm may start the job again by itself after a node failure (`--requeue`)."""


class ParallelismSection(Section):
    """How the model is laid over the ranks. Rank order: tensor fastest, then context, expert, data, and pipeline last.
    The sizes of all five multiply to the world size."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks that share every layer (tp)."""

    pipeline_parallel_size: PositiveInt = 1
    """Stages of the pipeline (pp)."""

    data_parallel_size: PositiveInt | None = None
    """Replicas (dp); default: what the nodes leave, world size / (tp x cp x ep x pp). On a local site, which starts as
    many ranks as tp x cp x ep x pp x dp asks for, the default fills the site's `ranks_per_node`."""

    context_parallel_size: PositiveInt = 1
    """Ranks that share every sequence (cp), for a program of `run.command`: `bsl train` does not cut sequences."""

    expert_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a layer (ep), for a program of `run.command`: `bsl train` has no experts. Leave
    it at 1 where experts are spread over the data-parallel ranks: then ep is not an axis of its own."""

    partition_method: str = "type:transformer|embedding"
    """How layers are shared out over stages. DeepSpeed's rules: `uniform`, `parameters`, or `type:REGEX` over layer
    class names. By `bsl plan`'s prices, embeddings and head included: `time` makes the slowest stage as quick, `memory`
    the fullest as empty as any cut can. `bsl submit` writes down the cut, as `time:7,6,6,5`; that can be given too."""

    def topology(self, num_ranks: int) -> Topology:
        """The sizes as a topology. Where dp is left out it is what `num_ranks` ranks leave, at least 1."""
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
    """Tokens of one sample."""

    vocab_size: PositiveInt
    """Tokens of the vocabulary, before padding."""

    vocab_size_multiple: PositiveInt = 128
    """The vocabulary is padded to a multiple of this times tp. Padding never takes part in the loss."""

    positions: Positions = "learned"
    """How the model knows places: `learned`: a vector for each, in a layer of its own. `rotary`: queries and keys are
    turned (an even head width is needed). `alibi`: scores fall with the distance, as in BLOOM."""

    tied_embeddings: bool = True
    """Whether the output layer shares its weight with the word embedding."""

    embedding_norm: bool = False
    """Whether a layer norm follows the embeddings, as in BLOOM; a layer of its own, so that no stage holds a copy."""

    dropout: Fraction = 0.0
    """Dropout probability in attention output and MLP output."""

    layernorm_epsilon: PositiveFloat = 1e-5
    """Epsilon of every layer norm."""

    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""

    declared_parameters: str | None = None
    """What people call the size, such as `176B`; `bsl plan` compares it with what the sizes give."""


class RampupSection(Section):
    """Batch-size ramp-up in Megatron's terms."""

    start: PositiveInt
    """First global batch size, samples."""

    increment: PositiveInt
    """Samples added at each step of the ramp; divides `global_batch_size - start`."""

    samples: PositiveInt
    """Samples over which the ramp extends."""


class TrainingSection(Section):
    """How long and in which batches."""

    steps: PositiveInt
    """Optimizer steps from the beginning of the run to its end."""

    micro_batch_size: PositiveInt
    """Samples of one micro batch on one data-parallel rank."""

    global_batch_size: PositiveInt
    """Samples of one optimizer step over all replicas."""

    rampup: RampupSection | None = None
    """Batch-size ramp-up; default: none."""

    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Number format of the weights that compute. bf16 keeps fp32 masters and accumulates gradients in fp32. fp16 keeps
    fp32 masters and scales the loss, by how much it finds out itself; it needs a GPU."""

    activation_checkpointing: bool = False
    """Whether activations of transformer layers are computed again in the backward pass."""

    stop_after_steps: PositiveInt | None = None
    """End this attempt with a checkpoint after that many steps of its own, as if it had been asked to stop."""


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
    """Longest gradient norm over the whole model; 0 does not clip."""


class DataSection(Section):
    """Where tokens come from."""

    prefix: str
    """Path of Megatron's indexed dataset without `.bin`/`.idx`; `bsl data prepare` makes one."""

    held_out: Fraction = 0.0
    """Share of the samples, at the end of the dataset, that is never trained on; evaluation takes them."""


class CheckpointSection(Section):
    """When to save and what to start from."""

    save_interval: PositiveInt | None = None
    """Steps between checkpoints; default: only at the end and when asked to stop."""

    keep_last: PositiveInt | None = None
    """How many of the newest checkpoints stay; older ones are deleted after a save, but for the last verified one and
    those that are pinned or half verified (`bsl checkpoint`). Default: all stay."""

    load: str = "auto"
    """`auto`: the newest checkpoint of the run, if it has one. `none`: start at step 0. Else the path of a checkpoint
    folder, which must hold one: the run begins with it, and goes on from its own once it has any."""


class MonitorSection(Section):
    """What the run leaves for people who watch it."""

    peak_tflops_per_rank: PositiveFloat | None = None
    """Peak TFLOP/s of one rank's device, to show utilisation; default: the site's."""

    dump_weights_steps: list[PositiveInt] = []
    """Steps around which every rank dumps its weights for `bsl diff-weights` (before and after the step)."""

    exit_margin_s: PositiveInt | None = None
    """Seconds before the time limit at which ranks are told to save and stop (`--signal`); default: computed."""

    save_time_s: PositiveFloat = 60.0
    """Expected seconds of one save: a term of the exit margin."""

    eval_interval: PositiveInt | None = None
    """Steps between evaluations; default: none. `bsl train` evaluates on `data.held_out`, after the save of the step if
    there is one."""

    eval_batches: PositiveInt = 4
    """Global batches of one evaluation of `bsl train`, the same samples each time."""

    eval_time_s: NonNegativeFloat = 0.0
    """Expected seconds of one evaluation."""

    step_time_s: PositiveFloat = 120.0
    """Expected seconds of one step: a term of the exit margin."""


class EnvironmentVariable(Section):
    """A variable of the ranks' environment, with the reason why it is set."""

    value: str
    """The value; quoted for the shell as it is."""

    reason: str
    """Why: printed as a comment above the export in the job script."""


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
    """Variables of the ranks' environment, over the site's."""
    faults: list[FaultSpec] = []
    """Faults and defects to inject; empty in any real run."""

    def topology(self, ranks_per_node: int) -> Topology:
        """The topology on `slurm.nodes` nodes with `ranks_per_node` ranks each.

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
    """Nodes in it; left out: the size is not checked."""

    max_time: SlurmDuration | None = None
    """Its time limit; left out: it has none."""


class Container(Section):
    """A container in which ranks run; becomes a prefix of the step."""

    kind: Literal["pyxis", "apptainer"]
    """`pyxis`: srun's own options (`--container-image`). `apptainer`: `apptainer exec` before the program."""

    image: str
    """Image file or name."""

    mounts: list[str] = []
    """Bind mounts, `HOST[:CONTAINER]`."""


# What the job script's header carries anyway; `account`, `qos` and their like have keys of their own.
WRITTEN_BY_BSL = re.compile(
    r"--(account|array|chdir|comment|constraint|cpus-per-task|error|exclude|gres|job-name|nodelist|nodes|no-requeue"
    r"|ntasks|ntasks-per-node|open-mode|output|parsable|partition|qos|requeue|reservation|signal|time)"
)


class SiteConfig(Section):
    """What we know of one cluster. A text file that a person edits; `bsl` never guesses it."""

    description: str
    """One line: what the cluster is."""

    scheduler: Literal["slurm", "local"]
    """`slurm`, or `local` for processes of this machine."""

    ranks_per_node: PositiveInt
    """GPUs of a node: one task, so one rank, for each. On a CPU site: tasks per node. On a local site: ranks of a run
    that does not name its `data_parallel_size`."""

    gpu: Gpu | None = None
    """The GPU, or nothing on a CPU site."""

    cpus_per_rank: PositiveInt | None = None
    """CPUs of each task (`--cpus-per-task`)."""

    gres: Word | None = None
    """Generic resource of one node, such as `gpu:8` (`--gres`); nothing on sites without."""

    partitions: dict[Word, Partition] = {}
    """Partitions, by name; none: Slurm's own default is used and nothing is checked."""

    default_partition: Word | None = None
    """The partition that is used when the run file names none."""

    default_time_limit: SlurmDuration | None = None
    """The time limit that is used when the run file names none."""

    reserve_nodes: NonNegativeInt = 0
    """Nodes of the partition that a run must leave free, to replace those that die."""

    account: Word | None = None
    """Default account."""

    qos: Word | None = None
    """Default quality of service."""

    reservation: Word | None = None
    """Default reservation."""

    constraint: Word | None = None
    """Default node features."""

    sbatch_options: list[Annotated[str, Field(pattern=r"^--[a-z][^\r\n]*$")]] = []
    """Further sbatch options, such as `--hint=nomultithread`; not those that `bsl` writes itself."""

    activation: list[str] = []
    """Shell lines that make the software available: modules, conda, a virtual environment."""

    environment: dict[EnvironmentName, EnvironmentVariable] = {}
    """Variables that every job of the site needs, each with its reason."""

    container: Container | None = None
    """Container of the ranks, or nothing."""

    network_interface: Word | None = None
    """Interface for rendezvous and gloo (`GLOO_SOCKET_IFNAME`), where the default is wrong."""

    calibration: str | None = None
    """File with the constants that `bsl plan` goes by, relative to the site file; `bsl plan calibrate` makes one."""

    node_mtbf_h: PositiveFloat | None = None
    """Mean hours between failures of one node; a job on n nodes fails n times as often."""

    allocation_ends: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] | None = None
    """Last day on which the account may compute, YYYY-MM-DD."""

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
            raise ValueError(f"`bsl` writes {', '.join(taken)} itself")
        if twice:
            raise ValueError(f"{', '.join(twice)} stands twice")
        return options
