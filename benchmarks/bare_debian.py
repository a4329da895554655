"""`bsl.pyz` in bare Debian systems: whether its answers are those of the installed command.

    mmdebstrap --variant=extract --include=python3,python3-minimal,bash,coreutils,libc-bin bullseye DIR
    python benchmarks/bare_debian.py DIR...

Each DIR holds a system in which nothing but Debian's python3 is installed. Needs root, for chroot. The answers of spy,
why, slow and diff-weights, from files, are compared byte for byte with those of this tree, and so are the exit codes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "diagnostics" / "signatures"
INSIDE = "bsl-look"
LOG = """step 3: loss 2.1
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB.
srun: error: node07: task 3: Exited with exit code 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", type=Path, nargs="+", metavar="DIR")
    systems = parser.parse_args().systems
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / INSIDE
        folder.mkdir()
        subprocess.run([sys.executable, "release/build_pyz.py", folder / "bsl.pyz"], cwd=ROOT, check=True)
        commands = make_evidence(folder)
        wanted = [ask([sys.executable, "-m", "bigsci_launch", *words], folder) for words in commands]
        print("| system | Python | answers | the same |\n|---|---|---|---|", flush=True)
        for system in systems:
            shutil.copytree(folder, system / INSIDE, dirs_exist_ok=True)
            print(row(system, commands, wanted), flush=True)
            shutil.rmtree(system / INSIDE)


def make_evidence(folder: Path) -> list[list[str]]:
    """Write what the commands read, and return them."""
    recordings = sorted(each.parent.name for each in LIBRARY.glob("*/recording"))[::16]
    for name in recordings:
        shutil.copytree(LIBRARY / name / "recording", folder / name)
    (folder / "job.log").write_text(LOG)
    for name, value in (("a", 1.0), ("b", 1.5)):
        write_tensor(folder / f"{name}.safetensors", [1.0, 2.0, value])
    return [
        *(["spy", "--bundle", name, "--json"] for name in recordings),
        ["spy", "--bundle", recordings[0]],
        ["why", "job.log"],
        ["why", "job.log", "--json"],
        ["slow", "."],
        ["diff-weights", "a.safetensors", "b.safetensors"],
        ["diff-weights", "a.safetensors", "a.safetensors"],
    ]


def write_tensor(path: Path, values: list[float]) -> None:
    """Write one tensor as a file of safetensors: the size of the head, the head as JSON, the bytes."""
    data = struct.pack(f"<{len(values)}f", *values)
    head = json.dumps({"w": {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def ask(argv: list[str], folder: Path | None) -> tuple[int, str, str]:
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
    if folder is not None:
        environment = {**environment, "HOME": os.environ["HOME"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout, done.stderr.replace("bsl.pyz", "bsl")


def row(system: Path, commands: list[list[str]], wanted: list[tuple[int, str, str]]) -> str:
    inside = ["chroot", str(system), "/usr/bin/env", "-C", f"/{INSIDE}", "python3"]
    version = ask([*inside, "-V"], None)[1].strip()
    wrong = []
    for words, answer in zip(commands, wanted, strict=True):
        found = ask([*inside, "bsl.pyz", *words], None)
        if found[:2] != answer[:2]:
            wrong.append(" ".join(words))
            print(f"{system.name}: {words}: {found} instead of {answer}"[:2000], file=sys.stderr)
    return f"| {system.name} | {version.removeprefix('Python ')} | {len(commands)} | {len(commands) - len(wrong)} |"


if __name__ == "__main__":
    main()
