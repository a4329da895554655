"""Memory of a rank of another program than `bsl train`, counted by what such a program keeps.

Kernels and formats decide, more than the name of the framework:

- **State.** 16-bit weights have 2 bytes. Gradients are added up in fp32 (4 bytes) or 16 bits (2); loops of their own
  and Megatron-DeepSpeed of 2022 keep both. FSDP shards all of it, and its weights are fp32. ZeRO divides the state of
  the optimizer over its ranks.
- **Layers.** Compiled kernels keep the inputs of norms and products, queries and keys before and after they are turned,
  and 6 bytes of an output of a gated MLP. Where SiLU and the product with it run one after the other, it is 8; where an
  RMS norm does, 10 more of each element of the stream. Programs of 2021 keep masks of dropout and all scores
  (Korthikanti et al., arXiv 2205.05198).
- **fp8.** Inputs of products are kept in 8 bits. Weights have a copy for each direction, in Megatron's recipes instead
  of 16-bit ones.
- **The loss.** What it needs of every logit, if it is not computed in chunks.

That is kept of each layer of a micro-batch in flight; recomputation leaves the layer's input. On top there is the
fullest moment: the loss on the last stage, or the backward pass of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.plan.price.held import FP32, ModelPart, PeakMemory, layer_weights
from bigsci_launch.plan.shape.setup import Setup

BUFFERED_GRADIENT = 5.0
"""Bytes per parameter of fp32 accumulators in 2022: 4, plus waste in their flat buffers (5.1 were measured)."""

FP16 = 2.0

FP8_COPIES = 2.0
"""Bytes of a weight in 8 bits, one copy for each direction. Megatron's recipes have no 16-bit weight with them."""

LIVE_PARAMETERS = 1e9
"""Parameters that DeepSpeed's ZeRO-3 has gathered at most, and as many again in its buckets of gradients."""

LOGIT_BYTES = {"plain": 16.0, "fused": 6.0, "chunked": 0.0}
"""Bytes of a logit while the loss is computed. Plain torch has the logits, their logarithms and two gradients in fp32;
a fused loss changes one copy in place; a loss in chunks has few at a time."""

HELD_LOGIT = 2.0
"""What is less where nothing holds the fp32 logits while the loss is computed, only the 16-bit ones."""


_ERRORS = {"megatron": 0.08, "torchtitan": 0.1, "other": 0.06, "deepspeed": 0.1, "fsdp": 0.15, "bsl": 0.1}
_ERROR_WITH_EXPERTS = 0.15
"""Relative errors of the need, by framework, near the limit of a GPU: of the published runs that had enough memory, all
but a few are within (`benchmarks/plan_memory.py`). With experts it is larger, since tokens spread unevenly."""


def error_of_need(setup: Setup) -> float:
    """Return the relative error of what `ProgramStage` counts."""
    error = _ERRORS[setup.framework]
    return max(error, _ERROR_WITH_EXPERTS) if setup.shape.experts else error


@dataclass(frozen=True, slots=True)
class ProgramStage(ModelPart):
    """A rank's part in such a program."""

    def count(self) -> PeakMemory:
        """Return its memory at the fullest moment."""
        technique = self.setup.technique
        full = technique.recomputation == "full"
        recomputed = min(self.num_layers, technique.recomputed_layers or self.num_layers) if full else 0
        layer = self._layer
        kept = self.in_flight * (recomputed * self._part + (self.num_layers - recomputed) * self._kept_of_layer)
        again = layer if recomputed else layer - self._kept_of_layer
        working = self._sent + self._gathered + max(self._head, again + self._gradients)
        return PeakMemory(self._weights_and_gradients, kept, max(working, self._step - kept))

    @property
    def _is_sharded(self) -> bool:
        """Whether FSDP keeps weights and gradients, both in fp32, in shards."""
        return self.setup.technique.zero_stage >= 2 and self.setup.framework in ("torchtitan", "fsdp")

    @property
    def _weights_and_gradients(self) -> float:
        """Bytes of weights and gradients. The optimizer's share of FSDP includes the fp32 weights."""
        setup, zero = self.setup, self.setup.technique.zero_stage
        if self._is_sharded:
            return FP32 * self.shared
        weights = self._element * (self.shared if zero == 3 else self.parameters)
        if setup.precision == "fp8" and zero < 3 and setup.framework != "megatron":
            weights += FP8_COPIES * self.num_layers * layer_weights(setup)
        return weights + self._gradient_bytes * (self.shared if zero >= 2 else self.parameters)

    @property
    def _gradient_bytes(self) -> float:
        """Bytes of the gradients of a parameter between micro-batches."""
        if not self.setup.has_fp32_gradients or self.setup.precision == "fp32":
            return self._element
        if self.setup.has_kernels_of_2021:
            return self._element + BUFFERED_GRADIENT
        return self._element + FP32 if self.setup.framework == "other" else FP32

    @property
    def _step(self) -> float:
        """Bytes of the optimizer's step: Megatron copies 16-bit gradients to fp32 there."""
        is_copied = self.setup.framework == "megatron" and self._gradient_bytes < FP32
        return FP32 * self.shared if is_copied else 0.0

    @property
    def _gathered(self) -> float:
        """Bytes of weights that ZeRO-3 has gathered: two layers in 16 bits, and the gradients of one."""
        if self.setup.technique.zero_stage < 3:
            return 0.0
        layer = layer_weights(self.setup)
        if not self._is_sharded:
            return FP16 * 2 * min(LIVE_PARAMETERS, 2 * layer)
        ends = 2 * self.setup.shape.padded_vocab_size(self.setup.topology.tp) * self.setup.shape.hidden_size
        return FP16 * (2 * layer + ends / self.setup.topology.tp) + (FP32 + FP16) * layer

    @property
    def _operand(self) -> float:
        """What is kept of the input of a product, relative to the activation."""
        return 0.5 if self.setup.precision == "fp8" else 1.0

    @property
    def _layer(self) -> float:
        """Bytes that a layer keeps of a micro-batch where nothing is recomputed."""
        return self._of_2021 if self.setup.has_kernels_of_2021 else self._norms + self._attention + self._mlp

    @property
    def _of_2021(self) -> float:
        """Without the sequence's part of tensor parallelism, ten bytes of an element are on all of its ranks."""
        shape, technique, tp = self.setup.shape, self.setup.technique, self.setup.topology.tp
        stream = self._tokens * shape.hidden_size
        inner = (8 if shape.mlp_inputs == 2 else 4) * shape.ffn_hidden_size - 16 * shape.hidden_size
        heads = 4 * (shape.key_value_size - shape.hidden_size) + 6 * (shape.query_size - shape.hidden_size)
        held = stream * (34 / tp if technique.sequence_parallel else 10 + 24 / tp)
        held += self._tokens * (inner + heads) / tp
        if technique.recomputation != "selective":
            held += 5 * shape.num_attention_heads * shape.sequence_length * self._tokens / tp
        return held * self._element / FP16

    @property
    def _norms(self) -> float:
        """Bytes of two norms: their inputs, and their results, which are inputs of products. One operation after the
        other also keeps the input and the result in fp32, and the result before it is weighed."""
        is_whole = self.setup.shape.norm == "layernorm" or self.setup.technique.kernels != "eager"
        between = 0.0 if is_whole else (2 * FP32 + FP16) / self._element * self._part
        return 2 * (self._part * (1 + self._operand) + between)

    @property
    def _attention(self) -> float:
        """Bytes of attention: queries, keys and values as they were multiplied, queries and keys turned, the result,
        in fp8 also as the input of a product, and the sums of the softmax."""
        shape, tp = self.setup.shape, self.setup.topology.tp
        queries, keys = shape.query_size, shape.key_value_size
        width = queries + 2 * keys + queries + (self._operand if self._operand < 1 else 0) * queries
        if shape.positions == "rotary":
            width += queries + keys
        sums = FP32 * self._tokens * shape.num_attention_heads / tp
        scores = 0.0
        if self.setup.technique.attention == "unfused" and self.setup.technique.recomputation != "selective":
            scores = 2 * self._element * shape.num_attention_heads * shape.sequence_length * self._tokens / tp
        return self._element * self._tokens * width / tp + sums + scores

    @property
    def _mlp(self) -> float:
        """Bytes of the MLP, or of experts for each token that visits them, with their inputs and their results."""
        shape, experts, tp = self.setup.shape, self.setup.shape.experts, self.setup.topology.tp
        if experts is None:
            return self._of_widths(shape.ffn_hidden_size / tp)
        share = shape.expert_layers / shape.num_layers
        width = (experts.ffn_hidden_size * experts.per_token + experts.shared_ffn_hidden_size) / tp
        moved = experts.per_token * shape.hidden_size / tp * self._element * (self._operand + 1)
        return (1 - share) * self._of_widths(shape.ffn_hidden_size / tp) + share * (
            self._of_widths(width) + self._tokens * moved
        )

    def _of_widths(self, width: float) -> float:
        """Return the bytes inside of an MLP of `width`: what it multiplied, and the result of its activation. One
        operation after the other also keeps SiLU of the gate."""
        inputs = self.setup.shape.mlp_inputs
        between = 1 if inputs == 2 and self.setup.technique.kernels not in ("compiled", "graphs") else 0
        return self._element * self._tokens * width * (inputs + between + self._operand)

    @property
    def _kept_of_layer(self) -> float:
        """Bytes that a layer keeps until its backward pass if it is not recomputed as a whole."""
        if self.setup.technique.recomputation != "selective" or self.setup.has_kernels_of_2021:
            return self._layer
        shape, tp = self.setup.shape, self.setup.topology.tp
        if self.setup.framework == "torchtitan":
            # Every other product: queries, values, the gate and the result of the MLP; and attention.
            width = (2 * shape.query_size + shape.key_value_size + shape.ffn_hidden_size) / tp
            return 2 * self._part + self._element * self._tokens * width
        if shape.experts:
            active = shape.experts.ffn_hidden_size * shape.experts.per_token
            return self._layer - self._element * self._operand * self._tokens * active / tp
        return self._layer

    @property
    def _gradients(self) -> float:
        """Bytes of gradients in the backward pass of an MLP: of its inside, and two of the stream."""
        shape, tp = self.setup.shape, self.setup.topology.tp
        width = shape.ffn_hidden_size
        if shape.experts:
            width = max(
                width * bool(shape.experts.dense_layers), shape.experts.ffn_hidden_size * shape.experts.per_token
            )
        return self._element * self._tokens * (shape.mlp_inputs + 1) * width / tp + 2 * self._stream

    @property
    def _head(self) -> float:
        """Bytes of the loss and of the input of the head on the last stage."""
        if not self._is_last:
            return 0.0
        tp, loss, is_whole = self.setup.topology.tp, self.setup.technique.loss, self.setup.gathers_logits
        columns = self.setup.shape.padded_vocab_size(tp) / (1 if is_whole else tp)
        if self.setup.has_kernels_of_2021 and self.setup.framework != "megatron":
            size = FP16
        else:
            size = LOGIT_BYTES[loss] - (HELD_LOGIT if loss == "plain" and not is_whole else 0.0)
        return size * self._tokens * columns + self._stream

    @property
    def _sent(self) -> float:
        """Bytes of what stages send each other."""
        return 0.0 if self.setup.topology.pp == 1 else 2 * self._part
