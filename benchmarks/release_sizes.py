"""Measures a release: sizes, and the processor time of starts, next to those of the version before.

    python benchmarks/release_sizes.py docs/measurements/release.md --before CLONE --pythons PYTHON...

CLONE is a tree of the version before; its wheel is built, and its commands start with this Python's libraries. Each
PYTHON runs `bsl.pyz` with nothing but its standard library, and its verdict on a recording is compared with that of
this tree. Processor time is that of the cheapest of five starts, because a busy machine makes seconds longer.
The sections of the page stay.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDING = ROOT / "diagnostics" / "signatures" / "stale-build-lock" / "recording"
STARTS = 5
COMMANDS = {
    "bsl --version": ["--version"],
    "bsl --help": ["--help"],
    "bsl spy --bundle, 4 ranks": ["spy", "--bundle", str(RECORDING)],
}
Row = tuple[str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--pythons", type=Path, nargs="+", default=[Path(sys.executable)])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        subprocess.run([sys.executable, "release/release.py", work / "now"], cwd=ROOT, check=True)
        build = [sys.executable, "-m", "hatchling", "build", "-d", str(work / "before")]
        subprocess.run(build, cwd=options.before, check=True)
        sizes = size_rows(work / "before", work / "now")
        starts = [
            (name, *(starts_of(tree, words) for tree in (options.before, ROOT))) for name, words in COMMANDS.items()
        ]
        files = [pyz_row(work, python) for python in options.pythons]
    _, mark, rest = options.page.read_text().partition("\n## ")
    options.page.write_text(page_of(version_of(options.before), sizes, starts, files) + mark + rest)


def version_of(tree: Path) -> str:
    return (tree / "bigsci_launch" / "__init__.py").read_text().split('__version__ = "')[1].partition('"')[0]


def size_rows(before: Path, now: Path) -> list[Row]:
    kinds = {"pure wheel": "*none-any.whl", "wheel with the C part": "*linux*.whl", "sdist": "*.tar.gz"}
    kinds["bsl.pyz"] = "bsl.pyz"
    return [(name, size_of(before, pattern), size_of(now, pattern)) for name, pattern in kinds.items()]


def size_of(folder: Path, pattern: str) -> str:
    found = next(folder.glob(pattern), None)
    return f"{found.stat().st_size / 1e6:.2f} MB" if found is not None else "-"


def starts_of(tree: Path, words: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installation has its compiled modules
    return f"{cheapest([sys.executable, '-m', 'bigsci_launch', *words], environment):.0f} ms"


def cheapest(argv: list[str], environment: dict[str, str]) -> float:
    """Return the milliseconds of processor time of the cheapest of some starts."""
    return min(processor_ms(argv, environment) for _ in range(STARTS))


def processor_ms(argv: list[str], environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, env=environment, capture_output=True, check=False, cwd="/")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def pyz_row(work: Path, python: Path) -> tuple[str, ...]:
    """Return the version, whether the verdict is that of this tree, and the time of the first and of later starts."""
    home = work / "home"
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
    argv = [str(python), "-S", str(work / "now" / "bsl.pyz")]
    version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.split()[1]
    first = processor_ms([*argv, "--version"], environment)
    later = cheapest([*argv, "--version"], environment)
    spy = ["spy", "--bundle", str(RECORDING), "--json"]
    one = subprocess.run([*argv, *spy], env=environment, capture_output=True, text=True, check=False)
    whole = subprocess.run(
        [sys.executable, "-m", "bigsci_launch", *spy], cwd=ROOT, capture_output=True, text=True, check=False
    )
    is_equal = "yes" if one.stdout == whole.stdout != "" else "**no**"
    unpacked = sum(file.stat().st_size for file in home.rglob("*") if file.is_file() and file.suffix != ".pyc")
    shutil.rmtree(home)
    return version, is_equal, f"{first:.0f} ms", f"{later:.0f} ms", f"{unpacked / 1e6:.1f} MB"


def page_of(before: str, sizes: list[Row], starts: list[Row], files: list[tuple[str, ...]]) -> str:
    load = float(Path("/proc/loadavg").read_text().split()[0])
    lines = [
        *("# A release: sizes and starts", ""),
        f"{time.strftime('%Y-%m-%d')}, by `benchmarks/release_sizes.py`, Python {sys.version.split()[0]},",
        f"load {load:.0f} on {os.cpu_count()} cores. *Before* is version {before}.",
        *("", *table(("file", "before", "now"), sizes), ""),
        "Processor time of a start, the cheapest of five:",
        *("", *table(("command", "before", "now"), starts), ""),
        "`bsl.pyz` under Pythons with nothing but their standard library. The first start unpacks it into the user's",
        "cache.",
        "*Same verdict*: the JSON document of `bsl spy --bundle` is, byte for byte, that of the installed command.",
        *("", *table(("Python", "same verdict", "first start", "later starts", "unpacked"), files), ""),
    ]
    return "\n".join(lines)


def table(columns: tuple[str, ...], rows: list[Row] | list[tuple[str, ...]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (columns, ("---",) * len(columns), *rows)]


if __name__ == "__main__":
    main()
