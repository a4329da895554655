"""Floating-point operations of a training step, by the corrected formula of bigscience Megatron-DeepSpeed#251.

    24 x passes x B x s x L x h^2 x (1 + s / 6h) + 6 x B x s x h x V

with B samples of s tokens, L layers of width h, V the padded vocabulary size, and 4 passes if activations are
recomputed in the backward pass, otherwise 3. The head is never recomputed: 2 h V forward, 4 h V backward. (#251 has
the head inside the bracket, which is the same for 4 passes and 4.5 h V for 3.) An MLP whose width is not 4h counts
with its own width. With grouped-query attention or SwiGLU the layer's matrices count as they are: 2 operations per
weight and token.

Model FLOPs, from which the utilisation is computed, are those of 3 passes: what recomputation repeats is no progress.
Attention counts over the whole square of s x s scores, as in PaLM's MFU, Megatron's logs and torchtitan's, although a
causal kernel computes half of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.config.schema.run import RunConfig


@dataclass(frozen=True, slots=True)
class FlopCounter:
    """Counts the operations of a GPT. All sizes are numbers of elements."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    sequence_length: int
    padded_vocab_size: int
    recomputes_activations: bool
    key_value_size: int
    mlp_inputs: int

    @classmethod
    def of_config(cls, config: RunConfig) -> FlopCounter:
        """Return the counter for a run file."""
        return cls(
            num_layers=config.model.num_layers,
            hidden_size=config.model.hidden_size,
            ffn_hidden_size=config.ffn_hidden_size,
            sequence_length=config.model.sequence_length,
            padded_vocab_size=config.padded_vocab_size,
            recomputes_activations=bool(config.training.activation_checkpointing),
            key_value_size=config.model.hidden_size * config.num_key_value_heads // config.model.num_attention_heads,
            mlp_inputs=2 if config.model.activation == "swiglu" else 1,
        )

    def step_flops(self, num_samples: int) -> float:
        """Return the operations of one optimizer step over `num_samples` samples, summed over all ranks."""
        return self._flops(num_samples, passes=4 if self.recomputes_activations else 3)

    def model_flops(self, num_samples: int) -> float:
        """Return what one optimizer step needs without recomputation, summed over all ranks."""
        return self._flops(num_samples, passes=3)

    def _flops(self, num_samples: int, passes: int) -> float:
        h, s = self.hidden_size, self.sequence_length
        attention = 4 * h * h + 4 * h * self.key_value_size + 4 * s * h
        layer = attention + 2 * (self.mlp_inputs + 1) * h * self.ffn_hidden_size
        return num_samples * s * (passes * self.num_layers * layer + 6 * h * self.padded_vocab_size)

    def tflops_per_rank(self, num_samples: int, seconds: float, world_size: int) -> float:
        """Return the TFLOP/s of one rank in a step that took `seconds`."""
        return self.step_flops(num_samples) / (seconds * world_size * 1e12)

    def utilization(self, num_samples: int, seconds: float, world_size: int, peak_tflops: float) -> float:
        """Return the share (0 to 1) of the peak of all ranks that a step of `seconds` used for model FLOPs (MFU)."""
        return self.model_flops(num_samples) / (seconds * world_size * peak_tflops * 1e12)
