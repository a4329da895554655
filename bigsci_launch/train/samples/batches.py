"""Micro batches of one data-parallel rank, cut from the token stream of an indexed dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bigsci_launch.config.micro_batches import assumed_size
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.data.fingerprint import DataFingerprint, fingerprint
from bigsci_launch.data.indexed import IndexedDataset, open_dataset, tokenizer_path
from bigsci_launch.errors import DataError
from bigsci_launch.safe_files import parse_json, read_file
from bigsci_launch.topology import Coordinate, Topology
from bigsci_launch.train.samples.sampler import SampleOrder, Share, num_samples, split_samples


class Batches:
    """The micro batches of one rank."""

    def __init__(self, dataset: IndexedDataset, config: RunConfig, share: Share) -> None:
        self._dataset = dataset
        self._length = config.model.sequence_length
        self._vocab_size = config.model.vocab_size
        self._share = share
        split = split_samples(dataset.num_tokens, self._length, config.data.held_out)
        self._held_out = split.held_out
        self._order = SampleOrder(len(split.trained), config.run.seed)

    def step(self, consumed_samples: int, num_micro_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tokens and labels of every micro batch of one step, each (micro batch, length) int64.

        Raises:
            DataError: a token outside the model's vocabulary.
        """
        for positions in self._share.positions(consumed_samples, num_micro_batches):
            yield self._micro_batch([self._order.sample(position) for position in positions])

    def held_out(self, num_micro_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield micro batches of samples that training never sees, in order from the first one.

        Starts again at the first sample when there are too few.
        """
        for positions in self._share.positions(0, num_micro_batches):
            yield self._micro_batch([self._held_out[position % len(self._held_out)] for position in positions])

    @property
    def dataset(self) -> IndexedDataset:
        return self._dataset

    @cached_property
    def fingerprint(self) -> DataFingerprint:
        """What tells this dataset from another one."""
        return fingerprint(self._dataset)

    def cut(self, micro_batch_size: int) -> None:
        """Cut batches into micro-batches of another size from now on; a step has the same samples."""
        self._share = replace(self._share, micro_batch_size=micro_batch_size)

    def begin_at(self, first: int) -> None:
        """Take micro batches in a row from now on, from number `first` of each step on."""
        self._share = Share(self._share.micro_batch_size, 0, 1, first)

    @property
    def dp(self) -> int:
        return self._share.dp

    def first_of(self, consumed_samples: int, micro_batch: int, further: int) -> tuple[Tensor, Tensor]:
        """Return tokens and labels, each (length,) int64, of the first sample of a micro batch of the step that begins
        after `consumed_samples`, for the rank `further` places of dp from this one."""
        share = replace(self._share, dp_rank=(self._share.dp_rank + further) % self._share.dp)
        positions = share.micro_batch(consumed_samples, micro_batch)
        return self.at(positions[0])

    def at(self, position: int) -> tuple[Tensor, Tensor]:
        """Return tokens and labels, each (length,) int64, of the sample that is drawn at `position`."""
        tokens, labels = self._micro_batch([self._order.sample(position)])
        return tokens[0], labels[0]

    def _micro_batch(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        windows = torch.from_numpy(np.stack([self._window(sample) for sample in samples]))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _window(self, sample: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        start = sample * self._length
        window = self._dataset.tokens[start : start + self._length + 1].astype(np.int64)
        if window.max() >= self._vocab_size or window.min() < 0:
            raise DataError(
                f"{self._dataset.prefix}: token {window.max()} at {start}..{start + self._length}, but "
                f"model.vocab_size is {self._vocab_size}",
                hint="set model.vocab_size to that of the tokenizer that made the dataset",
            )
        return window


def open_batches(config: RunConfig, topology: Topology, coordinate: Coordinate) -> Batches:
    """Open the dataset at `data.prefix` for the rank at `coordinate`.

    Raises:
        DataError: the dataset is missing, broken, too short for one sample, or made with a larger vocabulary.
    """
    prefix = Path(config.data.prefix)
    dataset = open_dataset(prefix)
    if num_samples(dataset.num_tokens, config.model.sequence_length) < 1:
        raise DataError(
            f"{prefix}: holds {dataset.num_tokens} tokens, but one sample at model.sequence_length "
            f"{config.model.sequence_length} needs {config.model.sequence_length + 1}"
        )
    split = split_samples(dataset.num_tokens, config.model.sequence_length, config.data.held_out)
    if not split.trained or (config.data.held_out and not split.held_out):
        raise DataError(
            f"{prefix}: data.held_out {config.data.held_out:g} leaves {len(split.trained)} samples to train on and "
            f"{len(split.held_out)} to evaluate on"
        )
    vocab_size = tokenizer_vocab_size(prefix)
    if vocab_size is not None and vocab_size > config.model.vocab_size:
        raise DataError(
            f"{prefix}: made with a vocabulary of {vocab_size}, larger than model.vocab_size {config.model.vocab_size}",
            hint=f"set model.vocab_size to {vocab_size}, or prepare the data with a smaller --vocab-size",
        )
    share = Share(assumed_size(config.training, topology), coordinate.dp_rank, topology.dp)
    return Batches(dataset, config, share)


def tokenizer_vocab_size(prefix: Path) -> int | None:
    """Return the vocabulary size of the tokenizer stored with the dataset, or None if there is no tokenizer."""
    try:
        return len(parse_json(read_file(tokenizer_path(prefix), follow=True))["model"]["vocab"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{tokenizer_path(prefix)}: cannot be read: {error}") from error
