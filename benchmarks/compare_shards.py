"""Measures `bsl diff-weights` against `cmp` on one file and on many shards: equal, one flipped bit, all different.

    python benchmarks/compare_shards.py [--folder DIR] [--gigabytes 1] [--shards 2000] [--rounds 5] [--jobs 1,2,4,8]

Writes .safetensors files of one size in bytes, cut into one file and into `--shards` files, four times: a, an equal
copy, a copy with one flipped bit, and one that differs everywhere. Each round runs all programs in turn, with the files
in the page cache and, in half as many rounds, from disk. The yardstick is `cmp -s` of the identical files. Prints a
table in Markdown. Needs numpy and safetensors, and eight times the size in disk space.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from compare_weights import BSL, Measured, cmp_of, evict, run, table, verdict, warm

SIDES = {"equal": 0, "one flipped bit": 1, "all different": 1}
GOAL_WARM, GOAL_COLD = 0.6, 1.1


def make_sides(folder: Path, gigabytes: float, num_files: int) -> None:
    """Make the four sides in `folder`, each of `num_files` files with four tensors of float32."""
    import numpy as np
    from safetensors.numpy import save_file

    length = int(gigabytes * 1e9 / 4 / 4 / num_files)
    for number in range(num_files):
        source = np.random.default_rng(number)
        values = {f"layer.{number}.{name}": source.random(length, np.float32) for name in "abcd"}
        for side in ("a", *SIDES):
            if side == "one flipped bit" and number == num_files // 2:
                values[f"layer.{number}.c"].view(np.uint32)[length // 2] ^= 1
            if side == "all different":
                values = {name: value + np.float32(1) for name, value in values.items()}
            (folder / side).mkdir(parents=True, exist_ok=True)
            save_file(values, folder / side / f"shard-{number:05d}.safetensors")
    os.sync()


def programs(folder: Path, jobs: list[int]) -> dict[str, tuple[list[str], int]]:
    """Return programs by name, each with the exit code of a right answer."""
    found: dict[str, tuple[list[str], int]] = {"`cmp -s`, equal": (cmp_of(folder / "a", folder / "equal"), 0)}
    for side, code in SIDES.items():
        found[f"**bsl diff-weights**, {side}"] = ([*BSL, str(folder / "a"), str(folder / side)], code)
    for count in jobs:
        argv = [*BSL, "--jobs", str(count), str(folder / "a"), str(folder / "equal")]
        found[f"**bsl diff-weights --jobs {count}**, equal"] = (argv, 0)
    return found


def measure(
    folder: Path, chosen: dict[str, tuple[list[str], int]], rounds: int, prepare: Callable[[list[Path]], None]
) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name, (argv, code) in chosen.items():
            prepare([folder / side for side in ("a", *SIDES)])
            measured = run(argv)
            if measured.code != code:
                raise SystemExit(f"{name}: exit code {measured.code} instead of {code}\n{measured.output}")
            found[name].append(measured)
    return found


def report(folder: Path, gigabytes: float, num_files: int, rounds: int, jobs: list[int]) -> Iterator[str]:
    """Measure one cut and yield its part of the page."""
    make_sides(folder, gigabytes, num_files)
    yield f"## {gigabytes:g} GB in {num_files:,} file{'s' * (num_files != 1)}"
    chosen = programs(folder, jobs)
    warm([folder / side for side in ("a", *SIDES)])
    measure(folder, chosen, 1, lambda folders: None)
    for where, goal, count, prepare in (
        ("in the page cache", GOAL_WARM, rounds, lambda folders: None),
        ("on the disk", GOAL_COLD, max(1, rounds // 2), evict),
    ):
        found = measure(folder, chosen, count, prepare)
        yardstick, equal = list(found)[:2]
        fastest = [min(one.seconds for one in found[name]) for name in (equal, yardstick)]
        yield from ("", f"Files {where}:", "", *table(found, yardstick), "")
        yield verdict(f"equal, {where}, times `cmp`", fastest[0] / fastest[1], goal, "x")
        peak = max(one.peak_mb for name, runs in found.items() if "bsl" in name for one in runs)
        yield verdict("peak private memory", peak, 64, " MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--shards", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=lambda text: [int(part) for part in text.split(",") if part], default=[])
    options = parser.parse_args()
    for num_files in (1, options.shards):
        place = Path(tempfile.mkdtemp(prefix="bsl-shards-", dir=options.folder))
        try:
            for line in report(place, options.gigabytes, num_files, options.rounds, options.jobs):
                print(line, flush=True)
        finally:
            shutil.rmtree(place)


if __name__ == "__main__":
    main()
