"""Makes values of the leaves of a tree."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from bigsci_launch.weights.files.tensors import Place, StoredValue
from bigsci_launch.weights.objects.encode import encode, show

# Longer contents are replaced by their digest.
MAX_CONTENT = 64


def value_of(name: str, place: Place, path: Path, node: Any) -> StoredValue:
    """Return a leaf as a value.

    Raises:
        NotPlain: the leaf contains something that is no plain value.
    """
    content = encode(node)
    if len(content) > MAX_CONTENT:
        content = b"#" + hashlib.sha256(content).digest()
    return StoredValue(name, place, path, content, show(node))
