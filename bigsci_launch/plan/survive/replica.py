"""What pipelines of any number of nodes need and take, for the model of a run on its site.

The prices are those of `bsl plan`: the same count of work and memory, weighed by the same calibration. A stage is one
tensor-parallel group and never spans nodes, so that a lost node takes whole stages with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.count import count_work
from bigsci_launch.plan.price.memory import count_memory, judge_fit, weigh_memory
from bigsci_launch.plan.price.neighbours import point_of
from bigsci_launch.plan.price.step_time import drift_on, hop_seconds, layer_and_head_seconds
from bigsci_launch.plan.price.terms import rates_of, weigh_work
from bigsci_launch.plan.shape.parameters import count_stage_parameters
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.plan.survive.cut import CutModel, find_cut
from bigsci_launch.plan.survive.schedule import StageTime
from bigsci_launch.plan.survive.templates import Template
from bigsci_launch.plan.survive.transfer import ModelBytes, UnitBytes
from bigsci_launch.topology import Topology


@dataclass(frozen=True)
class Replica:
    """A run's model, cut into pipelines of nodes that tolerate `failures` lost nodes at the same time.

    Memory is counted for the fewest replicas, `replicas` or else `failures` + 1: then each shard of the optimizer is
    largest.
    """

    setup: Setup
    calibration: Calibration
    failures: int
    node_memory_gib: float | None = None
    replicas: int | None = None

    def __post_init__(self) -> None:
        tp, ranks = self.setup.topology.tp, self.setup.ranks_per_node
        if ranks % tp:
            raise ConfigError(
                f"parallelism.tensor_parallel_size: {tp} ranks of a stage do not divide the {ranks} ranks of a node; a "
                "stage that spans nodes is lost with any of them, and is not planned",
                hint=f"a tensor_parallel_size that divides {ranks}",
            )

    @property
    def fewest_replicas(self) -> int:
        return self.replicas or self.failures + 1

    @property
    def stages_per_node(self) -> int:
        return self.setup.ranks_per_node // self.setup.topology.tp

    @property
    def num_micro_batches(self) -> int:
        """Micro batches of a step, over all pipelines."""
        return self.setup.global_batch_size // self.setup.micro_batch_size

    @property
    def most_nodes(self) -> int:
        """The nodes of a pipeline in which every stage has one layer."""
        return self.setup.shape.num_layers // self.stages_per_node

    @cached_property
    def cut_model(self) -> CutModel:
        """Seconds of layers and messages, and the layers that fit a stage."""
        work = count_work(self._uniform(1, 1), self.calibration.gpu)
        layer, head = (seconds * self._factor for seconds in layer_and_head_seconds(work, self.calibration.constants))
        # A forward pass is repeated when activations are recomputed; the head never is.
        share = 1 / self.setup.num_passes
        body = StageTime(layer * share, layer * (1 - share))
        last = StageTime(body.forward + head / 3, body.backward + head * 2 / 3)
        return CutModel((*[body] * (self.setup.shape.num_layers - 1), last), self._most_layers, self._hop)

    @cached_property
    def _factor(self) -> float:
        """How much slower than counted a step is: the drift of the cluster, and what measured neighbours say."""
        found = self.calibration
        drift_from = found.drift_from.toordinal() if found.drift_from else None
        day = self.setup.day.toordinal() if self.setup.day else None
        return drift_on(day, found.constants.drift, drift_from) * found.time_neighbours.look_up(point_of(self.setup))[0]

    @cached_property
    def _hop(self) -> float:
        """Seconds of one message between stages. The planner's hop is a pair of them, there and back."""
        # Stages of two nodes at least, since others send over NVLink.
        work = count_work(self._uniform(2 * self.stages_per_node, 1), self.calibration.gpu)
        return self._factor * hop_seconds(work, rates_of(self.calibration.constants)) / 2

    def once_per_step(self, num_stages: int, num_pipelines: int) -> float:
        """Return the seconds of a step outside the pipelines: gradients and weights between replicas, the optimizer."""
        work = count_work(self._uniform(num_stages, num_pipelines), self.calibration.gpu)
        reduced = weigh_work(work.step, rates_of(self.calibration.constants))
        return self._factor * (reduced + work.unexplained_seconds)

    def _uniform(self, pp: int, dp: int) -> Setup:
        topology = Topology(tp=self.setup.topology.tp, pp=pp, dp=dp)
        return replace(self.setup, topology=topology, partition_method="uniform")

    def _replicas_of(self, pp: int, dp: int, micro_batches: int) -> Setup:
        """Return `dp` replicas that have so many micro batches each."""
        return replace(self._uniform(pp, dp), global_batch_size=micro_batches * self.setup.micro_batch_size * dp)

    def _fullest(self, num_stages: int) -> Setup:
        """Return the fewest replicas, with as many micro batches each as one can get while every other one has one."""
        count = self.fewest_replicas
        return self._replicas_of(num_stages, count, max(1, self.num_micro_batches - count + 1))

    def _most_layers(self, stage: int, num_stages: int) -> int:
        """Return how many layers fit into the GPUs of a stage; the need rises with each layer."""
        setup = self._fullest(num_stages)
        fits, too_many = 0, self.setup.shape.num_layers + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._is_too_much(setup, stage, middle):
                too_many = middle
            else:
                fits = middle
        return fits

    def _is_too_much(self, setup: Setup, stage: int, num_layers: int) -> bool:
        found = self.calibration
        need, _ = weigh_memory(count_memory(setup, stage, num_layers), found.constants, found.gpu)
        is_known = found.knows_need_of(setup)
        fit = judge_fit(setup, need, found.gpu, is_known=is_known)
        return fit == "does not fit" or (fit == "doubtful" and not is_known)

    @cached_property
    def model_bytes(self) -> ModelBytes:
        """What moves between nodes, over all tensor-parallel ranks of a stage. Untied, the head has a table too."""
        shape, tp = self.setup.shape, self.setup.topology.tp
        # Stages without a layer isolate what precedes and what follows the layers.
        first, block, last = count_stage_parameters(shape, tp, (0, 1, 0))
        if shape.tied_embeddings:
            last -= shape.padded_vocab_size(tp) // tp * shape.hidden_size

        def unit(name: str, num_parameters: int) -> UnitBytes:
            return UnitBytes.of(name, tp * num_parameters, self.setup.element_bytes)

        layers = tuple(unit(f"layer {index}", block) for index in range(shape.num_layers))
        return ModelBytes(unit("embedding", first), layers, unit("head", last), shape.tied_embeddings)

    def host_gib(self, size: int) -> float:
        """Return the host memory of a node of a pipeline of `size` nodes for what replaces lost state: its own shard as
        a snapshot, and the copies of others that its pipeline keeps. It is an average over the nodes."""
        count = self.fewest_replicas
        share = (1 + min(self.failures, count - 1)) / count
        return share * self.num_state_bytes / size / 2**30

    @cached_property
    def num_state_bytes(self) -> int:
        """Bytes of the optimizer's whole state."""
        return sum(unit.state for unit in self.model_bytes.units)

    def template(self, size: int) -> Template | None:
        """Return the pipeline of `size` nodes; None if the model does not fit it."""
        num_stages = size * self.stages_per_node
        if size > self.most_nodes or (self.node_memory_gib and self.host_gib(size) > self.node_memory_gib):
            return None
        cut = find_cut(self.cut_model, num_stages, 4 * num_stages)
        return Template(size, cut.counts, self.cut_model) if cut else None

    @cached_property
    def fewest_nodes(self) -> int | None:
        """n0: the fewest nodes that hold one replica; None if no number does."""
        return next((size for size in range(1, self.most_nodes + 1) if self._holds_a_replica(size)), None)

    def _holds_a_replica(self, size: int) -> bool:
        num_stages = size * self.stages_per_node
        if self.node_memory_gib and self.host_gib(size) > self.node_memory_gib:
            return False
        limits = [self._most_layers(stage, num_stages) for stage in range(num_stages)]
        return min(limits) >= 1 and sum(limits) >= self.setup.shape.num_layers

    def with_replicas(self, count: int) -> Replica:
        """Return the same for at least so many replicas."""
        return replace(self, replicas=count)

    def need_gib(self, counts: Sequence[int]) -> float:
        """Return the GiB that a GPU of the fullest stage needs."""
        setup = self._fullest(len(counts))
        found = self.calibration
        return max(
            weigh_memory(count_memory(setup, stage, layers), found.constants, found.gpu)[0]
            for stage, layers in enumerate(counts)
        )

    def whole_seconds(self, count: int) -> float | None:
        """Return the seconds of a step of so many replicas of the configured layout; None if they do not fit."""
        if count not in self._whole:
            self._whole[count] = self._price_whole(count) if 0 < count <= self.num_micro_batches else None
        return self._whole[count]

    def _price_whole(self, count: int) -> float | None:
        counts, micro_batches = self._configured.counts, -(-self.num_micro_batches // count)
        setup = self._replicas_of(len(counts), count, micro_batches)
        if any(self._is_too_much(setup, stage, layers) for stage, layers in enumerate(counts)):
            return None
        return self._configured.seconds(micro_batches) + self.once_per_step(len(counts), count)

    @cached_property
    def _configured(self) -> Template:
        """The configured layout. Its size does not matter."""
        return Template(1, self.setup.layers_per_stage, self.cut_model)

    @cached_property
    def _whole(self) -> dict[int, float | None]:
        return {}
