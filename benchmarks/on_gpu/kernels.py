"""Which kernels a step of the 1.3B model runs on the card, eager and compiled, and where the time of a step is.

Each case is a rank whose fourth step is profiled. Kernels are grouped by what their names say. `busy_ms` is the time of
all kernels; what a step takes beyond it, the card waits for the host.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from on_gpu.card import Card
from on_gpu.record import Record, run_phase
from on_gpu.speed import BILLION, COMPILED, TINY
from on_gpu.trained import ReadyRank

LIMIT_S = 55.0
NAMED = 6
"""Kernels of a case that get a row of their own."""
GROUPS = (
    ("attention", r"flash|fmha|sdpa|attention"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|scaled_mm|(?:^|::)(?:add)?mm$|linear"),
    ("compiled", r"^triton_"),
    ("optimizer", r"multi_tensor|[Aa]dam|foreach"),
    ("norms", r"[Ll]ayer_?[Nn]orm|rms_norm|GammaBeta"),
    ("copies", r"[Mm]emcpy|[Mm]emset|copy|direct_copy|_to_copy|fill"),
    ("sums", r"reduce|sum|norm"),
    ("element by element", r"elementwise|vectorized|add|mul|gelu"),
)
"""Kinds of kernels, each by a pattern of its names; the first that fits counts."""
ON_CARD = (BILLION, COMPILED, replace(COMPILED, name="1.3B in fp8, compiled", precision="fp8"))


def run(record: Record, card: Card) -> None:
    """Profile each case."""
    with tempfile.TemporaryDirectory() as scratch:
        for number, gpt in enumerate(TINY[:1] if card.is_tiny else ON_CARD):
            file = Path(scratch) / f"{number}.json"
            rank = ReadyRank(gpt, card, Path(scratch) / str(number), 99, ["on_gpu.programs.profiled_rank", str(file)])
            trained = rank.take_turn(LIMIT_S)
            record.check(f"{gpt.name} was profiled", file.exists(), trained.words)
            if file.exists():
                _note(record, gpt.name, json.loads(file.read_text()))


def _note(record: Record, case: str, profile: dict[str, dict[str, list[float]]]) -> None:
    kernels = profile["kernels"]
    groups: dict[str, list[float]] = {}
    for name, (count, ms) in kernels.items():
        entry = groups.setdefault(group_of(name), [0, 0.0])
        entry[0], entry[1] = entry[0] + count, entry[1] + ms
    num, busy_ms = (sum(each[place] for each in kernels.values()) for place in (0, 1))
    record.row(case=case, kernels=num, busy_ms=round(busy_ms, 1), profiled_ms=profile["wall_ms"])
    for group, (count, ms) in sorted(groups.items(), key=lambda item: -item[1][1]):
        record.row(case=case, kind=group, launches=count, ms=round(ms, 2), share=ms / busy_ms)
    for name, (count, ms) in sorted(kernels.items(), key=lambda item: -item[1][1])[:NAMED]:
        record.row(case=case, kernel=name[:120], launches=count, ms=round(ms, 2))


def group_of(kernel: str) -> str:
    """Return what kind of kernel has this name."""
    return next((group for group, pattern in GROUPS if re.search(pattern, kernel)), "others")


if __name__ == "__main__":
    run_phase(run)
