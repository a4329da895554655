"""Compares the counters in DeepSpeed's model-states files with those of the checkpoint's record. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.formats.deepspeed import MODEL_STATES
from bigsci_launch.weights.formats.torch_file import read_torch_file


def find_other_counters(folder: Path, step: int, consumed_samples: int) -> Iterator[str]:
    """Yield one sentence for each model-states file in `folder` that is of another step or place in the data.

    A counter that a file does not hold is named too: it is not taken for equal.
    """
    expected = {"iteration": step, "global_steps": step, "consumed_train_samples": consumed_samples}
    for path in sorted(path for path in folder.iterdir() if MODEL_STATES.fullmatch(path.name)):
        try:
            tree = read_torch_file(path).tree
        except UnreadableFile as error:
            yield f"{path}: cannot be read: {error.why}"
            continue
        held = tree if isinstance(tree, Mapping) else {}
        wrong = [f"{key} is {held.get(key, 'missing')}" for key, value in expected.items() if held.get(key) != value]
        if wrong:
            yield f"{path}: {', '.join(wrong)}; checkpoint.json has step {step}, {consumed_samples} consumed samples"
