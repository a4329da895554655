"""Memory of a rank of `bsl train`, counted tensor by tensor.

What torch holds is largest at one of a few moments of a step, and at each it is known what is alive. Nothing is fitted.

- In bf16 a weight has 2 bytes and an fp32 gradient, and over the data-parallel ranks an fp32 master and two moments. A
  16-bit gradient is added to the fp32 one as soon as it is there, through an fp32 copy, and freed.
- In fp16 and fp32 (DeepSpeed's other optimizer) gradients have the format of the weights and stay from the second
  micro-batch of a step on. There is a bucket of half a billion elements, and a second one in the reduction.
- A layer keeps the inputs of its norms and products, and what attention and the MLP's activation need: no scores, since
  attention is fused. Rotary positions keep both turned and unturned queries and keys, and the result of
  attention twice, in two orders.
- The last stage keeps the logits of the micro-batch before, since DeepSpeed's buffers take turns.
- Compiled layers compute SiLU again, have no biases of alibi, ignore selective recomputation, and give all gradients of
  a layer at the same time. What is alive inside of their code is not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigsci_launch.plan.price.held import FP32, ModelPart, PeakMemory, layer_weights
from bigsci_launch.plan.shape.setup import Setup, Technique

PRODUCT_WORKSPACE = 2 * 2**25
"""Bytes that cuBLAS keeps on Hopper: 32 MiB for the thread of the forward and that of the backward pass each."""

LOSS_BUFFER_ELEMENTS = 2**23
"""Elements of the loss's fp32 buffer (`train/parallel/loss.py`)."""

BUCKET_ELEMENTS = 500_000_000
"""Elements of DeepSpeed's reduction buckets."""


def is_own(setup: Setup) -> bool:
    """Return whether `bsl train` can do what is planned. Of anything else it is not known what it would keep."""
    technique, axes = setup.technique, setup.topology
    possible = Technique(
        kernels=technique.kernels,
        recomputation=technique.recomputation,
        sequence_parallel=technique.sequence_parallel,
        overlap=technique.overlap & {"data"},
    )
    is_dense = axes["cp"] == axes["ep"] == setup.expert_shards == 1 and setup.shape.experts is None
    return setup.framework == "bsl" and technique == possible and is_dense


@dataclass(frozen=True, slots=True)
class OwnStage(ModelPart):
    """A rank's part in `bsl train`."""

    def count(self) -> PeakMemory:
        """Return its memory at the fullest moment."""
        kept = self.in_flight * (self.num_layers * self._kept_of_layer + self._passed_on)
        peak = max(self._moments(kept)) + self._always
        return PeakMemory(self._element * self.parameters + self._gradients, kept, peak - kept)

    def freed(self) -> float:
        """Return the bytes of blocks that torch's allocator keeps although they are free: weights are built in fp32,
        and their blocks are too small for what is flat later. Without bf16 also the second bucket, and in fp16 the fp32
        gradients of a step."""
        weights = FP32 * self.parameters
        if self._adds_in_fp32:
            return weights
        return weights + self._bucket + (FP32 * self.shared if self._element < FP32 else 0.0)

    @property
    def _is_first(self) -> bool:
        return self.number == 0

    @property
    def _adds_in_fp32(self) -> bool:
        return self.setup.has_fp32_gradients and self._element < FP32

    @property
    def _table(self) -> float:
        """Elements of the table of the vocabulary."""
        shape, tp = self.setup.shape, self.setup.topology.tp
        return shape.padded_vocab_size(tp) / tp * shape.hidden_size

    @property
    def _logits(self) -> float:
        """Bytes of the logits of a micro-batch."""
        return self._element * self._tokens * self._table / self.setup.shape.hidden_size

    @property
    def _held_logits(self) -> float:
        return self._logits * min(2, self.setup.num_micro_batches) if self._is_last else 0.0

    @property
    def _has_shared_table(self) -> bool:
        """Whether embedding and head are one weight here, whose gradient is complete only at the end."""
        return self.setup.shape.tied_embeddings and self._is_first and self._is_last

    @property
    def _inner(self) -> float:
        """Bytes of one activation of the MLP's width."""
        return self._element * self._tokens * self.setup.shape.ffn_hidden_size / self.setup.topology.tp

    @property
    def _gradients(self) -> float:
        """Bytes of the gradients that wait for the next micro-batch."""
        if self._adds_in_fp32:
            return FP32 * self.parameters
        return self._element * self.parameters if self.setup.num_micro_batches > 1 else 0.0

    @property
    def _always(self) -> float:
        """Bytes that are always there: cuBLAS's workspaces, a bucket, and the biases of alibi."""
        shape, heads = self.setup.shape, self.setup.shape.num_attention_heads / self.setup.topology.tp
        is_blocked = self.setup.is_compiled and shape.sequence_length % 128 == 0
        has_biases = shape.positions == "alibi" and not is_blocked
        biases = self._element * heads * shape.sequence_length**2 if has_biases else 0.0
        return PRODUCT_WORKSPACE + self._bucket + biases + self._received

    @property
    def _bucket(self) -> float:
        return 0.0 if self._adds_in_fp32 else self._element * BUCKET_ELEMENTS

    @property
    def _overlaps(self) -> bool:
        """Whether gradients are sent as soon as they are complete: copies in 16 bits, which stay until the last."""
        return self._adds_in_fp32 and "data" in self.setup.technique.overlap and self.setup.num_replicas > 1

    @property
    def _received(self) -> float:
        """Bytes of what other stages send: a gradient from the next; and from the one before, which the last stage
        receives into a buffer of its own, an activation for each micro-batch, with at least two that take turns."""
        turns = min(max(2, self.in_flight), self.setup.num_micro_batches)
        activations = 0.0 if self._is_first else turns + (2 if self._is_last else 0)
        return self._part * (activations + (0 if self._is_last else 1))

    @property
    def _recomputed(self) -> str:
        chosen = self.setup.technique.recomputation
        return "none" if not self.num_layers or (chosen == "selective" and self.setup.is_compiled) else chosen

    @property
    def _kept_of_layer(self) -> float:
        """Bytes that a layer keeps of a micro-batch: its input alone if all else is recomputed, or its input and the
        results of attention and of all products but the last."""
        if self._recomputed == "full":
            return self._part
        return self._found_again + self._stream if self._recomputed == "selective" else self._whole_layer

    @property
    def _found_again(self) -> float:
        """Bytes of what a layer keeps in any case and does not recompute."""
        if self._recomputed == "full":
            return self._part
        shape, tp = self.setup.shape, self.setup.topology.tp
        heads = self._element * self._tokens * 2 * (shape.query_size + shape.key_value_size) / tp
        scores = FP32 * self._tokens * shape.num_attention_heads / tp
        return self._part + heads + scores + shape.mlp_inputs * self._inner

    @property
    def _whole_layer(self) -> float:
        """Bytes that a layer keeps of a micro-batch until its backward pass: norms have parts of the stream, products
        have all of it."""
        shape, tp, tokens = self.setup.shape, self.setup.topology.tp, self._tokens
        operand = self._operand
        norms = 2 * self._part + 2 * operand * self._stream
        heads = self._element * tokens * self._attention_width / tp
        statistics = tokens * FP32 * (2 * (2 if shape.norm == "layernorm" else 1) + shape.num_attention_heads / tp)
        return norms + heads + self._kept_of_mlp + statistics + self._masks

    @property
    def _kept_of_mlp(self) -> float:
        """Bytes that the inside of an MLP keeps: the input of GELU and its result; or gates, values, SiLU of the gates
        and the result."""
        more = 2 if self.setup.shape.mlp_inputs == 1 else 3 if self.setup.is_compiled else 4
        return self._inner * (more - 1 + self._operand)

    @property
    def _masks(self) -> float:
        """Bytes of what dropout keeps of a layer: one for each element, unless ranks with parts draw for the whole."""
        if not self.setup.has_dropout:
            return 0.0
        return 2 * self._part / (1 if self.setup.technique.sequence_parallel else self._element)

    @property
    def _operand(self) -> float:
        """What is kept of the input of a product, relative to the activation: in fp8 half of it, and nothing if layers
        are compiled, as their code rounds it again."""
        if self.setup.precision != "fp8":
            return 1.0
        return 0.0 if self.setup.is_compiled else 0.5

    @property
    def _attention_width(self) -> float:
        """Elements that attention keeps of a token: queries, keys, values and its result, turned and in another order
        where a kernel wants that."""
        shape = self.setup.shape
        queries, keys = shape.query_size, shape.key_value_size
        kept = queries + 2 * keys + queries
        is_copied = shape.positions == "rotary" and self._element < FP32
        if shape.positions == "rotary":
            kept += queries + keys
        elif keys < queries:
            kept += queries  # those that share keys are not adjacent in the product's result
        # The result is the input of a product as well.
        return kept + (queries * self._operand if is_copied or self._operand < 1 else 0)

    @property
    def _passed_on(self) -> float:
        """Bytes that a stage keeps of a micro-batch apart from its layers: what it sends, or the last norm and its
        input; with a norm of the embedding its input."""
        ends = self._part + self._stream if self._is_last else self._part
        return ends + (self._part if self._is_first and self.setup.shape.embedding_norm else 0.0)

    def _moments(self, kept: float) -> Iterator[float]:
        """Yield the bytes that are not state at each moment that may be the fullest."""
        if self._is_last:
            yield from (kept + each for each in self._of_head())
        if self.num_layers:
            waiting = self._held_logits + (self._element * self._table if self._has_shared_table else 0.0)
            again = 0.0 if self._recomputed == "none" else self._whole_layer - self._found_again
            yield from (kept + again + waiting + each for each in self._of_mlp())
        if self._is_first:
            sent = self._element * self.parameters if self._overlaps else 0.0
            yield self._held_logits + self._of_embedding() + sent
        yield from (self._held_logits + each for each in self._of_step())

    def _of_head(self) -> Iterator[float]:
        """Yield the bytes on top of what is kept: in the loss, in the head's products, and as its gradient is added."""
        row = self._logits / self._element / self._tokens
        buffer = FP32 * min(max(LOSS_BUFFER_ELEMENTS, row), row * self._tokens)
        yield self._held_logits + self._logits + buffer
        summed = self._part if self.setup.topology.tp > 1 else 0.0
        yield self._held_logits + self._logits + self._stream + summed + self._element * self._table
        if not self._has_shared_table:
            # Its input is freed, and the gradient of it has the same size.
            yield self._held_logits + self._added(self._table)

    def _of_mlp(self) -> Iterator[float]:
        """Yield the bytes on top of what is kept in the backward pass of the last layer's MLP, the first and fullest.

        It frees what it has used: the result of the activation with the second product, its inputs before the first.
        """
        shape, tp, inner, part = self.setup.shape, self.setup.topology.tp, self._inner, self._part
        width = shape.ffn_hidden_size / tp
        down, up = width * shape.hidden_size, shape.mlp_inputs * width * shape.hidden_size
        summed = part if tp > 1 else 0.0
        # The final norm is done with.
        begun = -self._stream if self._is_last else 0.0
        yield begun + inner + self._element * down
        yield begun + self._added(down)
        used = self._kept_of_mlp
        if shape.mlp_inputs == 2:
            # The gradients of gates and of values are spread over the places of both, and added.
            yield begun - used + 6 * inner
        yield begun - used + shape.mlp_inputs * inner + self._stream + summed + self._element * up
        yield begun - used + summed + self._added(up)
        if self.setup.is_compiled:
            rest = layer_weights(self.setup) - up
            yield begun - self._whole_layer + 2 * part + self._element * rest + self._added(up)

    def _of_embedding(self) -> float:
        """Return the bytes of the table's gradient: with that of the head, their sum as well."""
        parts = 3 * self._element * self._table if self._has_shared_table else self._element * self._table
        return self._stream + max(parts, self._added(self._table))

    def _added(self, elements: float) -> float:
        """Return the bytes of a new gradient while it is added."""
        return (self._element + (FP32 if self._adds_in_fp32 else 0)) * elements

    def _of_step(self) -> Iterator[float]:
        """Yield the bytes of the reduction: gradients in bf16, in one piece and also in fp32 if they are few. Otherwise
        a second bucket and this rank's part of the gradients, then those in fp32 instead of both buckets."""
        if self._adds_in_fp32:
            sent = self._element * self.parameters
            copied = FP32 * self.parameters if self.parameters <= BUCKET_ELEMENTS else 0.0
            # The first step does not overlap, and has no moments yet.
            yield max(sent, sent + copied - 2 * FP32 * self.shared) if self._overlaps else sent + copied
            return
        part, waiting = self._element * self.shared, self._element * self.parameters - self._gradients
        yield waiting + self._bucket + max(0.0, part - self._bucket)
        yield part + FP32 * self.shared - self._gradients - self._bucket
