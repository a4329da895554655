"""Floating-point operations of a training step, by the corrected formula of bigscience Megatron-DeepSpeed#251.

    24 x passes x B x s x L x h^2 x (1 + s / 6h + V / 16Lh)

with B samples of s tokens, L layers of width h, V the padded vocabulary size, and 4 passes if activations are
recomputed in the backward pass, otherwise 3. An MLP whose width is not 4h counts with its own width.
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

    @classmethod
    def of_config(cls, config: RunConfig) -> FlopCounter:
        """Return the counter for a run file."""
        return cls(
            num_layers=config.model.num_layers,
            hidden_size=config.model.hidden_size,
            ffn_hidden_size=config.ffn_hidden_size,
            sequence_length=config.model.sequence_length,
            padded_vocab_size=config.padded_vocab_size,
            recomputes_activations=config.training.activation_checkpointing,
        )

    def step_flops(self, num_samples: int) -> float:
        """Return the operations of one optimizer step over `num_samples` samples, summed over all ranks."""
        h, s = self.hidden_size, self.sequence_length
        passes = 4 if self.recomputes_activations else 3
        layer = 8 * h * h + 4 * h * self.ffn_hidden_size + 4 * s * h
        head = 1.5 * h * self.padded_vocab_size
        return passes * num_samples * s * (self.num_layers * layer + head)

    def tflops_per_rank(self, num_samples: int, seconds: float, world_size: int) -> float:
        """Return the TFLOP/s of one rank in a step that took `seconds`."""
        return self.step_flops(num_samples) / (seconds * world_size * 1e12)
