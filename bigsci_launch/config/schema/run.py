"""The run file: every key, its unit and its meaning. The JSON Schema and the manual are made from these docstrings.

Values are validated one by one here, in strict JSON mode (`"4"` is not an integer). Rules across sections are in
`check`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from bigsci_launch.config.schema.guards import FaultSpec, GuardsSection
from bigsci_launch.config.schema.monitor import MonitorSection
from bigsci_launch.config.schema.program import starts_trainer
from bigsci_launch.config.schema.section import DESCRIBING, NOTHING, OR_NOTHING, NotDescribed, Section
from bigsci_launch.config.schema.slurm import SlurmSection
from bigsci_launch.config.schema.survive import SurviveSection, or_switch, survive_defaults
from bigsci_launch.config.schema.technique import (
    Attention,
    ExpertsSection,
    Framework,
    Hidden,
    Kernels,
    LossKernel,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)
from bigsci_launch.config.schema.values import (
    EnvironmentName,
    EnvironmentVariable,
    Fraction,
    RunName,
    or_bare_values,
)
from bigsci_launch.topology import AXES, Topology


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
    MASTER_ADDR, MASTER_PORT, BSL_RUN_DIR and BSL_ATTEMPT. With `-m bigsci_launch.train` or `bsl train` in its
    arguments, it counts as `bsl train`: `[numactl, --localalloc, python, -m, bigsci_launch.train]`. Nothing is assumed
    about other programs."""

    framework: Framework | None = None
    """The framework of the program in `command`, from which `bsl plan` knows how it cuts layers, shards the state and
    communicates: `deepspeed` (Megatron-DeepSpeed), `megatron` (Megatron-LM, NeMo), `torchtitan`, `fsdp` (another
    program with FSDP), `other` (its own loop, which sends tensor by tensor). Default: `bsl` for `bsl train`. A run of
    another program without it is not priced."""

    log_limit_mib: NonNegativeInt = 256
    """Largest size of the log of one rank, MiB; 0: no limit. A log that reaches it keeps its beginning and the newest
    64 KiB, with a line that marks the cut."""

    @property
    def starts_trainer(self) -> bool:
        """Whether the ranks run `bsl train`, perhaps inside another program."""
        return starts_trainer(self.command)

    stop_signal: Literal["USR2", "USR1", "TERM", "INT"] = "USR2"
    """The signal that asks the program to save and stop before the time limit. `bsl train` takes USR2; Megatron-LM
    (`--exit-signal-handler`) and NeMo take TERM."""


class ParallelismSection(Section):
    """How the model is split over the ranks. In rank order, tensor varies fastest, then context, expert, data,
    pipeline. The product of the five sizes is the world size."""

    engine: Literal["deepspeed", "uneven"] = "deepspeed"
    """What runs the pipelines of `bsl train`. `deepspeed`: all have the same stages. `uneven`: pipelines of different
    depths use any number of ranks, and those that are left after a loss."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks that share every layer (tp)."""

    pipeline_parallel_size: PositiveInt = 1
    """Stages of the pipeline (pp). With `engine: uneven`, the fewest stages of a pipeline, which hold one replica (n0);
    the most are 2 n0 - 1."""

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

    expert_shards: PositiveInt = 1
    """Ranks over which a program spreads the experts of a layer inside its data-parallel ranks, as Megatron, DeepSpeed
    and torchtitan do. Not an axis: dp counts these ranks too."""

    sequence_parallel: bool = False
    """Whether tensor-parallel ranks also share the tokens of norms and dropout (Megatron's `--sequence-parallel`). The
    losses are the same, dropout included. tp must divide `sequence_length`."""

    zero_stage: ZeroStage = 1
    """What data-parallel ranks share: nothing (0), the optimizer's state (1: ZeRO-1, Megatron's distributed optimizer),
    gradients too (2), weights too (3: ZeRO-3, FSDP)."""

    shard_group_size: PositiveInt | None = None
    """Ranks that share one copy of the state, if fewer than all data-parallel ranks (HSDP)."""

    schedule: Schedule = "1f1b"
    """Order of micro batches in the pipeline: `1f1b`, `interleaved` (several chunks of layers per rank), or
    `zero_bubble` (weight gradients fill the bubble: ZB-H1)."""

    chunks_per_rank: PositiveInt = 1
    """Chunks of layers on each rank with `interleaved`: Megatron's virtual pipeline size."""

    overlap: list[Hidden] | None = None
    """Which communication overlaps with computation: any of `tensor`, `data` and `pipeline` parallelism. Default: what
    programs overlap by themselves: `data` with FSDP and ZeRO-3. `bsl train` overlaps only `data`, in bf16 and fp8."""

    def topology(self, num_ranks: int) -> Topology:
        """Return the sizes as a topology. If dp is left out, it is what `num_ranks` ranks allow, at least 1.

        Uneven pipelines are no grid: to all who do not know them, the ranks of each stage are a replica.
        """
        if self.engine == "uneven":
            tp = self.tensor_parallel_size
            return Topology(tp=tp, dp=max(1, num_ranks // tp))
        sizes = {axis.name: getattr(self, axis.key) for axis in AXES}
        given = Topology(**{axis: size or 1 for axis, size in sizes.items()})
        return given if sizes["dp"] else given.resized(dp=max(1, num_ranks // given.world_size))


Positions = Literal["learned", "rotary", "alibi"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "swiglu"]


MOST_LAYERS, WIDEST, LARGEST_BATCH = 1000, 1_000_000, 1_000_000
"""Beyond these, planning would not end; no real model or run comes close."""


class ModelSection(Section):
    """A GPT. Sizes are counts of elements. `bsl train`, `bsl plan` and `bsl rehearse` need it; a run of another program
    may leave it out."""

    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    """Transformer layers, at most 1000."""

    hidden_size: Annotated[int, Field(ge=1, le=WIDEST)]
    """Width of the residual stream, at most 1,000,000."""

    num_attention_heads: PositiveInt
    """Attention heads; must divide `hidden_size` and be divisible by tp."""

    num_key_value_heads: PositiveInt | None = None
    """Heads of keys and values (grouped-query attention), each shared by equally many attention heads; default:
    `num_attention_heads`. Must divide `num_attention_heads` and be divisible by tp."""

    head_size: PositiveInt | None = None
    """Width of one attention head; default: `hidden_size` / `num_attention_heads`."""

    experts: ExpertsSection | None = None
    """Mixture of experts; default: none."""

    ffn_hidden_size: PositiveInt | None = None
    """Width of the MLP; default: 4 x `hidden_size`. With `swiglu`, 8/3 x `hidden_size` gives as many weights as `gelu`
    has with 4 x."""

    activation: Activation = "gelu"
    """What the MLP applies between its matrices. `gelu`: GELU of one product. `swiglu`: SiLU of one product times
    another, so the MLP has three matrices; the first two are stored as one, whose even rows are the gate."""

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
    """Whether a norm follows the embeddings, as in BLOOM. It is a separate layer, so that no stage has a copy."""

    norm: Norm = "layernorm"
    """Every norm of the model. `rmsnorm` neither subtracts the mean nor has a bias."""

    biases: bool = True
    """Whether linear layers and layer norms have biases."""

    dropout: Fraction = 0.0
    """Dropout probability in attention output and MLP output."""

    layernorm_epsilon: PositiveFloat = 1e-5
    """Epsilon of every norm, also of `rmsnorm`."""

    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""

    declared_parameters: str | None = None
    """The nominal size, such as `176B`. `bsl plan` compares it with the computed number of parameters."""


class RampupSection(Section):
    """Batch-size ramp-up in Megatron's terms."""

    start: PositiveInt
    """First global batch size, samples."""

    increment: PositiveInt
    """Samples added at each step of the ramp; divides `global_batch_size - start`."""

    samples: PositiveInt
    """Samples until the ramp ends."""


class TrainingSection(Section):
    """The length of the run and the sizes of its batches. A run of another program may leave it out, unless it has
    `survive`."""

    steps: PositiveInt
    """Optimizer steps of the whole run."""

    micro_batch_size: Literal["auto"] | PositiveInt
    """Samples of one micro batch on one data-parallel rank. `auto`: `bsl train` finds the largest size that fits (with
    pipeline parallelism, the fastest one up to it), remembers it, and takes a smaller one when a rank runs out of
    memory. The global batch stays."""

    global_batch_size: Annotated[int, Field(ge=1, le=LARGEST_BATCH)]
    """Samples of one optimizer step over all replicas, at most 1,000,000."""

    rampup: RampupSection | None = None
    """Batch-size ramp-up; default: none."""

    precision: Precision = "bf16"
    """Number format of the weights used for computing. bf16 keeps fp32 masters and accumulates gradients in fp32. fp16
    keeps fp32 masters and uses dynamic loss scaling; it needs a GPU. fp8: bf16, but the matrix products of the
    transformer layers are computed in fp8, with one scale for each tensor; it needs a GPU of NVIDIA's Ada or Hopper
    generation or newer. A run can change between bf16 and fp8, as both save the same."""

    @property
    def weight_format(self) -> Precision:
        """Number format of weights, activations and checkpoints."""
        return "bf16" if self.precision == "fp8" else self.precision

    attention: Attention = "fused"
    """`fused`: one kernel that never stores the scores (FlashAttention, torch's scaled_dot_product_attention, cuDNN).
    `flash1`: the first FlashAttention, which is slower. `triton`: its version in Triton, of 2023, which is slower on
    Hopper. `flash3`: its third version, or cuDNN 9, which is faster there. `unfused`: products and softmax one after
    the other, as in Megatron of 2021."""

    kernels: Kernels | None = None
    """How the program in `run.command` computes norms, sums and activations: `eager` (one by one), `fused` (a
    norm in one kernel), `compiled`, or `graphs` (in CUDA graphs). Default: `compiled` for `megatron`, `torchtitan`."""

    loss: LossKernel | None = None
    """How the program in `run.command` computes the loss, which decides what it keeps of the logits: `plain` (torch's
    cross entropy, on all ranks of tp the whole vocabulary), `fused` (in place, each rank its part of the vocabulary),
    `chunked` (a few tokens at a time). Default: `plain` for `fsdp` and `other`, otherwise `fused`."""

    gradients: Literal["fp32", "bf16"] | None = None
    """In which format the program in `run.command` adds up the gradients of 16-bit weights. Default: fp32. `bf16` is
    Megatron's `--grad-reduce-in-bf16` (`grad_reduce_in_fp32: false`)."""

    optimizer_bytes: NonNegativeFloat | None = None
    """Bytes of optimizer state per parameter on the GPU, with an fp32 master of the weight, for the program in
    `run.command`. Default: 12, those of AdamW. Moments in 8 bits leave 6; on the host, there are 0."""

    activation_checkpointing: Recomputation = False
    """Whether the activations of transformer layers are recomputed in the backward pass. `selective`: `bsl train` keeps
    the results of matrix products and attention, and recomputes norms, activation functions, dropout and residual sums.
    For a program in `run.command`, `selective` recomputes only attention, and a number is that of the layers of each
    stage that are recomputed."""

    compile: bool = False
    """Whether `bsl train` compiles its transformer layers (torch.compile): fewer, larger kernels. The first step takes
    up to a minute more, until the code is kept on the node. The losses are those of eager layers within rounding. It
    needs gcc and Python's headers on the nodes."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """What the ranks compute on. `auto`: GPUs if a rank sees any, otherwise the CPU; a Slurm step that was given GPUs
    which torch cannot see is refused. `cuda`: a rank without a GPU is refused. `cpu`: never a GPU. Ranks that choose
    different devices are refused before they wait for each other."""

    share_devices: bool = False
    """Whether several ranks may compute on one GPU, for tests on a small machine. They communicate over gloo, through
    host memory, because NCCL refuses two ranks on one GPU."""

    deterministic: bool = False
    """Whether only operations whose sums have a fixed order are used, so that the same run on the same kind and number
    of GPUs gives the same losses to the last bit. Without it, attention's backward pass and some others add in any
    order on a GPU. Slower; an operation that has no such variant is an error. On a CPU `bsl train` is reproducible
    without it."""

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
    """Where the tokens come from. A run of another program may leave it out."""

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
    verified one, the newest that passed the guards' checks, and those that are pinned or half verified
    (`bsl checkpoint`)."""

    background: bool = False
    """Write checkpoints while training continues. Each rank keeps a copy of what it saves in host memory: its weights,
    and its part of the fp32 masters and moments. The last save of an attempt is not in the background."""

    load: str = "auto"
    """`auto`: the newest checkpoint of the run, if it has one. `none`: start at step 0. Otherwise the path of a
    checkpoint folder that has a checkpoint: the run starts from it, and resumes from its own once it has any."""


class RunConfig(Section):
    """A run file. Layers, weakest first: defaults below, the site, `extends`, this file, `--set key=value`."""

    run: RunSection
    slurm: SlurmSection = SlurmSection()
    parallelism: ParallelismSection = ParallelismSection()
    model: Annotated[ModelSection, OR_NOTHING] = NOTHING
    training: Annotated[TrainingSection, OR_NOTHING] = NOTHING
    optimizer: OptimizerSection = OptimizerSection()
    data: Annotated[DataSection, OR_NOTHING] = NOTHING
    checkpoint: CheckpointSection = CheckpointSection()
    monitor: MonitorSection = MonitorSection()
    guards: GuardsSection = GuardsSection()
    survive: Annotated[SurviveSection | None, BeforeValidator(survive_defaults), Field(json_schema_extra=or_switch)] = (
        None
    )
    """How the run continues within its job when a rank is lost; default: the attempt ends."""
    env: Annotated[dict[EnvironmentName, EnvironmentVariable], Field(json_schema_extra=or_bare_values)] = {}
    """Variables of the ranks' environment, by name. They override the site's."""
    faults: list[FaultSpec] = []
    """Faults and defects to inject. Empty in a real run."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is None and name in DESCRIBING:
            raise NotDescribed(name)
        return value

    def describes(self, *sections: str) -> bool:
        """Whether the run file has these of the sections that only describe a training."""
        return all(self.__dict__[section] is not None for section in sections)

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

    @property
    def num_key_value_heads(self) -> int:
        return self.model.num_key_value_heads or self.model.num_attention_heads
