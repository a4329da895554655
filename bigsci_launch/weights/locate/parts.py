"""What a file in a folder is, by its name: weights, or another part of a checkpoint, or no part of it."""

from __future__ import annotations

import re
from pathlib import Path

from bigsci_launch.weights.files.sources import Component

# Names that Trainer, accelerate, Lightning, Megatron-LM and bsl give to what they store with the weights. Numbers tell
# several optimizers, ranks or folders of FSDP apart: optimizer_1.bin, rng_state_3.pth, optimizer_0/.
_PARTS: tuple[tuple[Component, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"(?:distrib_|dist_)?optim(?:izer)?s?(?:_states?)?(?:[-_]?\d+)*(?:[-_]rank\d+)?")),
    ("scheduler", re.compile(r"(?:lr_)?scheduler(?:_states?)?(?:_\d+)*")),
    ("random states", re.compile(r"(?:rng|random)_(?:states?|rank)(?:[-_]\d+)*")),
    ("training arguments", re.compile(r"training_args")),
    ("trainer state", re.compile(r"(?:latest_)?train(?:er)?_state")),
    ("data loader", re.compile(r"(?:sampler|dl_state_dict|dataloader(?:_states?)?)(?:_\d+)*")),
    ("other", re.compile(r"custom_checkpoint_\d+|scaler|common")),
)
STATE_FILES = ("trainer_state.json",)

# Files of these kinds hold no weights, whatever is in them. Other files are looked into.
PLAIN_SUFFIXES = (
    *(".json", ".jsonl", ".md", ".txt", ".py", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".log", ".jinja", ".csv"),
    *(".tsv", ".sh", ".html", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".lock", ".vocab", ".tiktoken", ".spm"),
)
PLAIN_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", ".gitattributes", ".gitignore", "LICENSE")
LOG_OF_TENSORBOARD = "events.out.tfevents."


def component_of(path: Path) -> Component:
    """Return which part of a checkpoint a file or folder is, by its name."""
    stem = path.name.partition(".")[0]
    return next((component for component, pattern in _PARTS if pattern.fullmatch(stem)), "weights")


def is_plain_name(name: str) -> bool:
    """Whether a file of this name holds no weights, whatever is in it."""
    is_listed = name in PLAIN_NAMES or name.endswith(PLAIN_SUFFIXES)
    return is_listed or name.startswith(LOG_OF_TENSORBOARD)
