"""Settings of tiny runs with `parallelism.engine: uneven`."""

from __future__ import annotations

from typing import Any

UNEVEN: dict[str, Any] = {
    "engine": "uneven",
    "pipeline_parallel_size": 2,
    "data_parallel_size": None,
    "zero_stage": 0,
}
# A key's bias has no gradient but rounding, which AdamW enlarges.
OFF: dict[str, Any] = {"monitor": {"watch": "off"}, "guards": {"interval": "off"}, "model": {"biases": False}}
