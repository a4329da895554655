"""What happens to the files of a run between two attempts. Each edit gets the run's folder and that of the bases."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

RUN_RECORD = "run.json"
EARLY, LATE = "global_step3", "global_step6"
FIRST_OF_LAST_STAGE = 4  # after the embedding, the positions and two transformer layers


def newest(run: Path) -> Path:
    return run / "checkpoints" / LATE


def files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a checkpoint that match; at least one."""
    found = sorted(folder.glob(pattern))
    assert found, f"{folder}: nothing matches {pattern}"
    return found


def edit_record(key: str, value: object) -> Callable[[Path, Path], None]:
    def edit(run: Path, bases: Path) -> None:
        path = newest(run) / "checkpoint.json"
        document = json.loads(path.read_text())
        *parents, last = key.split(".")
        at = document
        for parent in parents:
            at = at[parent]
        assert at[last] != value
        at[last] = value
        path.write_text(json.dumps(document, indent=2) + "\n")

    return edit


def take_early(*patterns: str) -> Callable[[Path, Path], None]:
    """Replace files of the newest checkpoint by those of the one before."""

    def edit(run: Path, bases: Path) -> None:
        for pattern in patterns:
            for path in files(newest(run), pattern):
                shutil.copy2(run / "checkpoints" / EARLY / path.relative_to(newest(run)), path)

    return edit


def take_stage(run: Path, bases: Path) -> None:
    """Replace all that the last of two stages wrote: layers that only it holds, its rank's shard, states, digests."""
    layers = sorted({path.name.split("-")[0] for path in files(newest(run), "layer_*")})
    mine = [f"{name}-*" for name in layers if int(name.removeprefix("layer_")) >= FIRST_OF_LAST_STAGE]
    take_early(*mine, "*pp_rank_0_mp_rank_01_optim*", "mp_rank_01*", "rng_rank_0001*", "digests/*1.*")(run, bases)
    fit_sizes(run)


def take_rank(run: Path, bases: Path) -> None:
    take_early("*zero_pp_rank_1*", "rng_rank_0001*", "digests/*1.*")(run, bases)
    fit_sizes(run)


def take_all(run: Path, bases: Path) -> None:
    record = newest(run) / "checkpoint.json"
    kept = record.read_bytes()
    shutil.rmtree(newest(run))
    shutil.copytree(run / "checkpoints" / EARLY, newest(run))
    record.write_bytes(kept)
    fit_sizes(run)


def fit_sizes(run: Path) -> None:
    """Let the record have the sizes of the files: digits of a step may have made a file longer."""
    path = newest(run) / "checkpoint.json"
    document = json.loads(path.read_text())
    document["files"] = {name: (newest(run) / name).stat().st_size for name in document["files"]}
    path.write_text(json.dumps(document, indent=2) + "\n")


def flip(pattern: str) -> Callable[[Path, Path], None]:
    def edit(run: Path, bases: Path) -> None:
        path = files(newest(run), pattern)[0]
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)

    return edit


def truncate(run: Path, bases: Path) -> None:
    path = files(newest(run), "*optim*")[0]
    path.write_bytes(path.read_bytes()[:-1000])


def remove(pattern: str) -> Callable[[Path, Path], None]:
    def edit(run: Path, bases: Path) -> None:
        files(newest(run), pattern)[0].unlink()

    return edit


def other_run(run: Path, bases: Path) -> None:
    """Put the checkpoints of a run of equal sizes in place of the run's own."""
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(bases / "dp2-other-seed" / "checkpoints", run / "checkpoints")


def fresh_run(run: Path, bases: Path) -> None:
    """Leave nothing of the run: it starts from the base's checkpoint by `checkpoint.load`."""
    shutil.rmtree(run)


def other_tokens(run: Path, bases: Path) -> None:
    """Put other tokens under the path of the dataset."""
    data = bases.parent / "data"
    for path in other_files(data):
        shutil.copy2(path, data / "moving" / path.name)


def other_files(data: Path) -> Iterator[Path]:
    yield from (data / "other").iterdir()


EDITS: dict[str, Callable[[Path, Path], None]] = {
    "consumed 0": edit_record("consumed_samples", 0),
    "step 5": edit_record("step", 5),
    "config edited": edit_record("config.optimizer.learning_rate", 0.5),
    "stage of step 3": take_stage,
    "rank of step 3": take_rank,
    "shard of step 3": take_early("*zero_pp_rank_1*optim*"),
    "record of step 6": take_all,
    "bit in optimizer": flip("*optim*"),
    "bit in layer": flip("layer_*"),
    "bit in random": flip("rng_rank*"),
    "truncated": truncate,
    "missing shard": remove("*optim*"),
    "missing digests": remove("digests/*"),
    "another run's": other_run,
    "fresh run": fresh_run,
    "other tokens": other_tokens,
}
