"""Fuzzes the readers of weights with atheris (libFuzzer for Python), for a bounded time.

    pip install atheris
    python benchmarks/fuzz_weights.py --seconds 600 [--corpus DIR]

A file of any bytes, under the suffix of a format, is compared with itself and with a sound file, as `bsl diff-weights`
does. Whatever the bytes are, the comparison must end with an answer (exit code 0, 1 or 4) or with one of the project's
own errors, within seconds and with bounded memory (`TIMEOUT_S`, `RSS_LIMIT_MB`: the fuzzer's own needs included). The
corpus begins with small sound files of every format. Ends with exit code 0 if nothing was found; otherwise libFuzzer
prints the error and writes the bytes that caused it to a file `crash-*`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pickle
import shutil
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["bigsci_launch"]):
    from bigsci_launch.errors import BslError
    from bigsci_launch.weights.compare.compare import compare_weights
    from bigsci_launch.weights.explain import audit  # noqa: F401  # imported here so that it is instrumented
    from bigsci_launch.weights.formats import contents, digests, json_state, numpy_file, text_dump  # noqa: F401
    from bigsci_launch.weights.locate.locate import open_weights
    from bigsci_launch.weights.show.report import as_document, summary_lines

SUFFIXES = (".pt", ".safetensors", ".npz", ".npy", ".digests.json", ".txt", ".index.json", ".ckpt")
RSS_LIMIT_MB, TIMEOUT_S = 1024, 4
FOLDER = Path(tempfile.mkdtemp(prefix="bsl-fuzz-"))


def sound_files() -> list[bytes]:
    """Return small sound files, each with the number of its suffix before it, as the fuzzer makes them."""
    import numpy as np
    import torch
    from safetensors.numpy import save_file

    tree = {"model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3).bfloat16()}, "step": 3, "lr": 1e-3}
    found = []
    for suffix, is_zip in ((".pt", True), (".pt", False)):
        stream = io.BytesIO()
        torch.save(tree, stream, _use_new_zipfile_serialization=is_zip)
        found.append((suffix, stream.getvalue()))
    save_file({"w": np.arange(6, dtype=np.float32)}, FOLDER / "sound.safetensors")
    found.append((".safetensors", (FOLDER / "sound.safetensors").read_bytes()))
    for suffix, save in ((".npy", np.save), (".npz", np.savez)):
        stream = io.BytesIO()
        save(stream, np.arange(6.0))  # type: ignore[operator]
        found.append((suffix, stream.getvalue()))
    found.append((".txt", b"w=Parameter containing:\ntensor([1., 2., 3.])\n"))
    index = {"metadata": {"total_size": 24}, "weight_map": {"w": "sound.safetensors"}}
    found.append((".index.json", json.dumps(index).encode()))
    found.append((".ckpt", pickle.dumps({"a": [1, 2.0, "x", None, b"y", (1, 2)]}, 2)))
    return [bytes([SUFFIXES.index(suffix)]) + data for suffix, data in found]


def compare_bytes(data: bytes) -> None:
    """Compare a file of these bytes with itself and with a sound one; the first byte chooses the suffix."""
    if not data:
        return
    suffix = SUFFIXES[data[0] % len(SUFFIXES)]
    name = "rank-0000" if suffix == ".digests.json" else "w-pp0-tp0-dp0" if suffix == ".txt" else "w"
    path = FOLDER / f"{name}{suffix}"
    path.write_bytes(data[1:])
    for other in (path, FOLDER / "sound.safetensors"):
        with contextlib.suppress(BslError):
            found = compare_weights(open_weights(path), open_weights(other, "b"))
            assert found.exit_code in (0, 1, 4)
            summary_lines(found)
            json.dumps(as_document(found))
    path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument(
        "--corpus", type=Path, help="Folder that keeps what the fuzzer learns; default: a temporary one"
    )
    options = parser.parse_args()
    corpus = options.corpus or FOLDER / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(sound_files()):
        (corpus / f"sound-{number}").write_bytes(data)
    limits = [f"-max_total_time={options.seconds}", f"-rss_limit_mb={RSS_LIMIT_MB}", f"-timeout={TIMEOUT_S}"]
    atheris.Setup([sys.argv[0], *limits, "-max_len=16384", str(corpus)], compare_bytes)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":
    main()
