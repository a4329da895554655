"""Tensors that a file stores once under several names, such as tied embeddings in a .pt file.

A .safetensors file contains such a tensor under one name only. The other names are then compared with that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from bigsci_launch.weights.files.tensors import StoredTensor
from bigsci_launch.weights.match.batches import ComparedSide, listed

SAFETENSORS = ".safetensors"


def storage_of(tensor: StoredTensor) -> Hashable:
    """Return what all names of one stored tensor have in common; None if its bytes are not known."""
    if not tensor.has_bytes or not tensor.num_bytes or not tensor.segments:
        return None
    return (tensor.segments, tensor.dtype, tensor.shape, tensor.strides)


@dataclass
class Storages:
    """The storages of one side that have several names; for each, one of them and its partner on the other side."""

    side: ComparedSide
    shared: set[Hashable] = field(default_factory=set)
    partners: dict[Hashable, tuple[str, StoredTensor]] = field(default_factory=dict)
    found: list[tuple[str, str]] = field(default_factory=list)

    def add(self, tensors: Iterable[StoredTensor]) -> None:
        """Note the storages of all tensors of a file."""
        counts = Counter(map(storage_of, tensors))
        self.shared |= {storage for storage, count in counts.items() if count > 1 and storage is not None}

    def pair(self, tensor: StoredTensor, partner: StoredTensor) -> None:
        """Note the partner of a tensor, in case another name of its storage has none."""
        storage = storage_of(tensor) if self.shared else None
        if storage in self.shared:
            self.partners.setdefault(storage, (tensor.name, partner))

    def partner_of(self, tensor: StoredTensor) -> StoredTensor | None:
        """Return what a tensor without a partner of its name is compared with: the partner of another name of it.

        None if there is none, or if the partner's format could have had this name too.
        """
        name, partner = self.partners.get(storage_of(tensor), ("", None))
        if partner is None or tensor.path.suffix == SAFETENSORS or partner.path.suffix != SAFETENSORS:
            return None
        self.found.append((tensor.name, name))
        return partner

    def notes(self) -> Iterator[str]:
        """Yield a note about the tensors for which another name's partner was used."""
        if self.found:
            other = "B" if self.side == "A" else "A"
            names = listed([f"{name} = {stored}" for name, stored in self.found])
            yield f"tensors with two names in {self.side} have one in {other}, and both are compared with it: {names}"
