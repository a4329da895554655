"""Whether two datasets are the same: contents count, the place does not, and what is not known is not "same"."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bigsci_launch.data import fingerprint as prints
from bigsci_launch.data.fingerprint import compare_with_saved, content_digest, fingerprint
from bigsci_launch.data.indexed import IndexedDataset, IndexedWriter, open_dataset, tokenizer_path


def write(prefix: Path, tokens: np.ndarray, tokenizer: str | None = "{}") -> IndexedDataset:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_document(tokens.astype(np.uint16))
    if tokenizer is not None:
        tokenizer_path(prefix).write_text(tokenizer)
    return open_dataset(prefix)


TOKENS = np.random.default_rng(5).integers(0, 500, 10_000)


def test_the_place_of_a_dataset_does_not_count(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a" / "x", TOKENS), write(tmp_path / "b" / "y", TOKENS)
    assert fingerprint(one).contents == fingerprint(other).contents
    assert compare_with_saved(fingerprint(one).document, other) == "same"


@pytest.mark.parametrize("place", [0, 5000, 9999])
def test_one_token_makes_another_dataset(tmp_path: Path, place: int) -> None:
    changed = TOKENS.copy()
    changed[place] += 1
    one, other = write(tmp_path / "a" / "x", TOKENS), write(tmp_path / "b" / "x", changed)
    assert fingerprint(one).contents != fingerprint(other).contents
    assert compare_with_saved(fingerprint(one).document, other) == "other"


def test_a_grown_dataset_is_told_from_another_one(tmp_path: Path) -> None:
    small, large = write(tmp_path / "a" / "x", TOKENS[:6000]), write(tmp_path / "b" / "x", TOKENS)
    assert compare_with_saved(fingerprint(small).document, large) == "grown"
    assert compare_with_saved(fingerprint(large).document, small) == "other"


def test_another_tokenizer_makes_another_dataset(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a" / "x", TOKENS), write(tmp_path / "b" / "x", TOKENS, '{"a": 1}')
    none = write(tmp_path / "c" / "x", TOKENS, None)
    assert compare_with_saved(fingerprint(one).document, other) == "other"
    assert compare_with_saved(fingerprint(one).document, none) == "other"


@pytest.mark.parametrize("saved", [None, {}, {"num_tokens": "many"}, {"num_tokens": 10_000, "tokens_digest": "0"}])
def test_a_checkpoint_that_does_not_say_is_not_the_same(tmp_path: Path, saved: dict[str, object] | None) -> None:
    assert compare_with_saved(saved, write(tmp_path / "a" / "x", TOKENS)) == "unknown"


def test_a_large_dataset_is_sampled_from_its_first_token_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prints, "_NUM_WINDOWS", 4)
    monkeypatch.setattr(prints, "_WINDOW", 100)
    digest = content_digest(TOKENS)
    seen = []
    for place in range(0, len(TOKENS), 50):
        changed = TOKENS.copy()
        changed[place] += 1
        if content_digest(changed) != digest:
            seen.append(place)
    changed = TOKENS.copy()
    changed[-1] += 1
    assert seen[0] == 0 and len(seen) == 8 and content_digest(changed) != digest
