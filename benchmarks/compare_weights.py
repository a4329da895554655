"""Measures the speed of `bsl diff-weights`, `cmp`, torch, safetensors and text dumps with `diff` in the same run.

    python benchmarks/compare_weights.py [--folder DIR] [--gigabytes 2] [--rounds 5] [--output FILE]

Makes two checkpoints of the given size (26 .pt files each) with five planted differences, and a third equal to the
first. Each round runs all programs in turn, so that load on the machine affects them alike. Needs torch, safetensors
and xxhash, and about six times the size in disk space. Writes a table in Markdown.

Goals, compared with `cmp -s` of identical data: the whole process takes at most 0.6x with the files in the page cache
and 1.2x from disk; at most 64 MB of anonymous memory; 10 ns per differing element; digests of 384 x 300 tensors
within 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.file_names import digests_name
from bigsci_launch.topology import Coordinate
from bigsci_launch.weights.formats.digests import digest_document

NUM_FILES, VOCABULARY_SHARE = 26, 0.18
GOAL_WARM, GOAL_COLD, GOAL_MB, GOAL_NS, GOAL_DIGESTS_S = 0.6, 1.2, 64, 10, 1.0
RANKS, TENSORS = 384, 300
BSL = [sys.executable, "-m", "bigsci_launch", "diff-weights"]
TORCH_EQUAL = """
import sys, glob, os, torch
a, b = sys.argv[1:]
n = 0
for path in sorted(glob.glob(a + "/*.pt")):
    x, y = (torch.load(p, weights_only=True) for p in (path, os.path.join(b, os.path.basename(path))))
    n += sum(not torch.equal(x[k], y[k]) for k in x)
sys.exit(n > 0)
"""
SAFETENSORS_EQUAL = """
import sys, glob, os, torch
from safetensors import safe_open
a, b = sys.argv[1:]
n = 0
for path in sorted(glob.glob(a + "/*.safetensors")):
    with safe_open(path, "pt") as x, safe_open(os.path.join(b, os.path.basename(path)), "pt") as y:
        n += sum(not torch.equal(x.get_tensor(k), y.get_tensor(k)) for k in x.keys())
sys.exit(n > 0)
"""
TEXT_DUMPS = """
import sys, glob, os, torch
for side in sys.argv[1:]:
    for path in sorted(glob.glob(side + "/*.pt")):
        with open(path + ".txt", "w") as out:
            for name, value in torch.load(path, weights_only=True).items():
                out.write(f"{name}={torch.nn.Parameter(value, requires_grad=False)}\\n")
    os.makedirs(side + "_txt", exist_ok=True)
    for path in glob.glob(side + "/*.txt"):
        os.replace(path, os.path.join(side + "_txt", os.path.basename(path)))
"""


INTRODUCTION = """\
Each program compares two checkpoints of {size:g} GB each, 26 files of bf16 tensors, on {cores} cores. The programs take
turns for {rounds} rounds, so that load on the machine affects them alike. Each is timed as a whole process, from start
to exit. The baseline is `cmp -s` of identical files, which reads every byte and reports only whether they are equal.

In the second pair of checkpoints, five tensors differ: a norm was reset, a copy of the embedding drifted, one element
differs by one unit in the last place, one is NaN, and one has another sign. `torch.equal` and text dumps only report
that something differs; a text dump prints and compares only the edges of each tensor. `bsl diff-weights` measures every
difference."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a program: wall and CPU seconds, peak anonymous memory in MB, exit code, output."""

    seconds: float
    cpu_seconds: float
    peak_mb: float
    code: int
    output: str


def make_checkpoints(folder: Path, gigabytes: float) -> None:
    """Make checkpoints a, b and c in `folder`, as .pt and .safetensors; c equals a, b differs in five tensors."""
    import torch
    from safetensors.torch import save_file

    hidden = 1024
    total = int(gigabytes * 1e9 / 2)
    vocabulary = int(total * VOCABULARY_SHARE / hidden)
    rows = (total - 2 * vocabulary * hidden) // (NUM_FILES - 2) // hidden // 9
    for number in range(NUM_FILES):
        generator = torch.Generator().manual_seed(number)
        values = _file(torch, generator, number, hidden, vocabulary, rows)
        for side in "acb":
            if side == "b":
                _plant(torch, values, number)
            for kind in ("pt", "st"):
                (folder / f"{side}_{kind}").mkdir(exist_ok=True)
            name = f"layer_{number:02d}-model_00-model_states"
            torch.save(values, folder / f"{side}_pt" / f"{name}.pt")
            save_file(values, folder / f"{side}_st" / f"{name}.safetensors")


def _file(torch, generator, number: int, hidden: int, vocabulary: int, rows: int):  # type: ignore[no-untyped-def]
    def made(*shape: int):  # type: ignore[no-untyped-def]
        return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

    if number in (0, NUM_FILES - 1):
        return {
            "word_embeddings.weight": made(vocabulary, hidden),
            "norm.weight": torch.full((hidden,), 0.9961).bfloat16(),
        }
    shapes = {"attention.qkv": 3 * rows, "attention.dense": rows, "mlp.up": 4 * rows, "mlp.down": rows}
    values = {f"{name}.weight": made(size, hidden) for name, size in shapes.items()}
    values |= {f"{name}.bias": made(size) for name, size in shapes.items()}
    values |= {f"{norm}.{part}": made(hidden) for norm in ("ln1", "ln2") for part in ("weight", "bias")}
    return values


def _plant(torch, values, number: int) -> None:  # type: ignore[no-untyped-def]
    """Plant a difference: a reset norm and a drifted copy, one ulp, a NaN or a sign, each in a different file."""
    if number == NUM_FILES - 1:
        values["norm.weight"] = torch.ones_like(values["norm.weight"])
        drifted = values["word_embeddings.weight"].float() * (
            1 + 1e-2 * torch.randn(values["word_embeddings.weight"].shape)
        )
        values["word_embeddings.weight"] = drifted.bfloat16()
    elif number == 5:
        values["mlp.up.weight"].view(torch.int16).view(-1)[12345] += 1
    elif number == 6:
        values["mlp.down.weight"].view(-1)[7] = float("nan")
    elif number == 7:
        values["ln1.bias"].view(-1)[3] = -values["ln1.bias"].view(-1)[3]


def environment() -> dict[str, str]:
    """Return a user's environment, in which Python keeps its byte code, as pip does for what it installs."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(argv: list[str]) -> Measured:
    """Run a program to its end and poll its anonymous memory."""
    with tempfile.TemporaryFile("w+") as output:
        began = time.perf_counter()
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.DEVNULL, env=environment())
        peak_kb, ended = 0, 0
        while not ended:
            peak_kb = max(peak_kb, _anonymous_kb(process.pid))
            time.sleep(0.003)
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        cpu_seconds = used.ru_utime + used.ru_stime
        return Measured(seconds, cpu_seconds, peak_kb / 1000, process.returncode, output.read())


def _anonymous_kb(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon:")), 0)


def evict(folders: list[Path]) -> None:
    """Drop the folders' files from the page cache."""
    os.sync()
    for folder in folders:
        for path in folder.iterdir():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def warm(folders: list[Path]) -> None:
    """Read the folders' files into the page cache."""
    for folder in folders:
        for path in folder.iterdir():
            with path.open("rb") as stream:
                while stream.read(1 << 24):
                    pass


def cmp_of(a: Path, b: Path) -> list[str]:
    return ["bash", "-c", 'cd "$0"; for f in *; do cmp -s "$f" "$1/$f"; done', str(a), str(b)]


def programs(folder: Path) -> dict[str, tuple[list[str], int]]:
    """Return programs by name, each with the exit code of a right answer."""
    pt, st = [folder / f"{side}_pt" for side in "acb"], [folder / f"{side}_st" for side in "acb"]
    python = [sys.executable, "-c"]
    return {
        "`cmp -s`, identical": (cmp_of(pt[0], pt[1]), 0),
        "**bsl diff-weights**, identical .pt": ([*BSL, str(pt[0]), str(pt[1])], 0),
        "**bsl diff-weights**, identical .safetensors": ([*BSL, str(st[0]), str(st[1])], 0),
        "**bsl diff-weights**, .pt against .safetensors": ([*BSL, str(pt[0]), str(st[1])], 0),
        "torch.load + torch.equal, identical": ([*python, TORCH_EQUAL, str(pt[0]), str(pt[1])], 0),
        "safetensors safe_open + torch.equal, identical": ([*python, SAFETENSORS_EQUAL, str(st[0]), str(st[1])], 0),
        "**bsl diff-weights**, five differences": ([*BSL, str(pt[0]), str(pt[2])], 1),
        "text dumps with `diff -r`, five differences": (["bash", "-c", text_command(pt[0], pt[2])], 1),
    }


def text_command(a: Path, b: Path) -> str:
    return f"{sys.executable} -c '{TEXT_DUMPS}' {a} {b} && diff -r {a}_txt {b}_txt > /dev/null"


def rounds_of(
    folder: Path, num_rounds: int, prepare: Callable[[list[Path]], None], names: list[str]
) -> dict[str, list[Measured]]:
    chosen = {name: program for name, program in programs(folder).items() if name in names}
    folders = [folder / f"{side}_{kind}" for side in "acb" for kind in ("pt", "st")]
    found: dict[str, list[Measured]] = {name: [] for name in chosen}
    for _ in range(num_rounds):
        for name, (argv, code) in chosen.items():
            prepare(folders)
            measured = run(argv)
            if measured.code != code:
                raise SystemExit(f"{name}: exit code {measured.code} instead of {code}\n{measured.output}")
            found[name].append(measured)
    return found


def differing_elements(a: Path, b: Path) -> tuple[int, int]:
    """Return the number of elements in differing tensors and of such tensors, from `bsl diff-weights --json`."""
    document = json.loads(run([*BSL, str(a), str(b), "--json"]).output)
    sizes = [entry["a"]["shape"] for entry in document["different"]]
    return sum(_product(shape) for shape in sizes), len(sizes)


def _product(shape: list[int]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def make_digests(folder: Path) -> None:
    """Write digests of 384 ranks x 300 tensors twice, with one digest changed."""
    source = random.Random(0)
    for rank in range(RANKS):
        at = Coordinate.at(pp=rank // 32, dp=rank // 4 % 8, tp=rank % 4)
        tensors = {f"{number}.mlp.dense_h_to_4h.weight": ["BF16", [3584, 14336], f"{source.getrandbits(128):032x}"]
                   for number in range(TENSORS)}  # fmt: skip
        for side in ("a", "b"):
            if side == "b" and rank == 200:
                tensors = {**tensors, "7.mlp.dense_h_to_4h.weight": ["BF16", [3584, 14336], "0" * 32]}
            target = folder / f"{side}_digests" / digests_name(rank)
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.dumps(digest_document(tensors, rank=rank, coordinate=at, step=0)))


def table(found: dict[str, list[Measured]], yardstick: str) -> Iterator[str]:
    yield "| program | fastest s | times `cmp` | median s | CPU s | peak private MB |"
    yield "|---|---|---|---|---|---|"
    base = _fastest(found[yardstick])
    for name, runs in found.items():
        seconds = [measured.seconds for measured in runs]
        fastest = min(seconds)
        peak = max(measured.peak_mb for measured in runs)
        cpu = statistics.median(measured.cpu_seconds for measured in runs)
        # The shell that runs several programs uses almost no memory itself.
        memory = f"{peak:.0f}" if peak >= 1 else "-"
        middle = statistics.median(seconds)
        yield f"| {name} | {fastest:.2f} | {fastest / base:.2f} | {middle:.2f} | {cpu:.2f} | {memory} |"


def verdict(what: str, value: float, goal: float, unit: str) -> str:
    return f"- {what}: {value:.2f}{unit}, goal {goal:g}{unit}: {'met' if value <= goal else '**missed**'}"


def report(folder: Path, gigabytes: float, num_rounds: int) -> str:
    """Measure everything and return the page."""
    make_checkpoints(folder, gigabytes)
    make_digests(folder)
    load_before = os.getloadavg()[0]
    names = list(programs(folder))
    yardstick, equal, differing = names[0], names[1], names[6]
    warm([folder / f"{side}_{kind}" for side in "acb" for kind in ("pt", "st")])
    rounds_of(folder, 1, lambda folders: None, names)  # compiles byte code before anything is measured
    hot = rounds_of(folder, num_rounds, lambda folders: None, names)
    cold = rounds_of(folder, max(1, num_rounds // 2), evict, [yardstick, equal])
    digests = [run([*BSL, str(folder / "a_digests"), str(folder / "b_digests")]) for _ in range(num_rounds)]
    elements, tensors = differing_elements(folder / "a_pt", folder / "b_pt")
    more = _fastest(hot[differing]) - _fastest(hot[equal])
    lines = [
        f"<!-- Made by `python benchmarks/compare_weights.py --gigabytes {gigabytes:g} --rounds {num_rounds}`. -->",
        "",
        "# How fast weights are compared",
        "",
        *INTRODUCTION.format(size=gigabytes, rounds=num_rounds, cores=os.cpu_count()).split("\n"),
        "",
        f"The load of the machine was {load_before:.1f} before and {os.getloadavg()[0]:.1f} after. "
        "If other programs ran,",
        "the fastest round shows what a program needs, and the median includes what it waited for.",
        "",
        "Files in the page cache:",
        "",
        *table(hot, yardstick),
        "",
        "Files on the disk (dropped from the page cache before each run):",
        "",
        *table(cold, yardstick),
        "",
        f"{tensors} tensors with {elements:,} elements differ; measuring them all costs {more:.2f} s more.",
        "",
        verdict("identical, warm, times `cmp`", _fastest(hot[equal]) / _fastest(hot[yardstick]), GOAL_WARM, "x"),
        verdict("identical, cold, times `cmp`", _fastest(cold[equal]) / _fastest(cold[yardstick]), GOAL_COLD, "x"),
        verdict("peak private memory, identical", max(m.peak_mb for m in hot[equal]), GOAL_MB, " MB"),
        verdict("peak private memory, five differences", max(m.peak_mb for m in hot[differing]), GOAL_MB, " MB"),
        verdict("statistics of differing tensors, per element", more / elements * 1e9, GOAL_NS, " ns"),
        verdict(f"digests of {RANKS} ranks x {TENSORS} tensors", _fastest(digests), GOAL_DIGESTS_S, " s"),
    ]
    return "\n".join(lines) + "\n"


def _fastest(runs: list[Measured]) -> float:
    return min(measured.seconds for measured in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to put the checkpoints (default: a temporary folder)")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of one checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="compare-weights-", dir=arguments.folder))
    try:
        text = report(folder, arguments.gigabytes, arguments.rounds)
    finally:
        shutil.rmtree(folder)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
