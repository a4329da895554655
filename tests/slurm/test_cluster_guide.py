"""Every command of docs/how-to/cluster.md, in order, in one shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "how-to" / "cluster.md"


def test_the_guide_runs_as_it_is_written(slurm_packages: None, short_tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BSL_CLUSTER_DIR": str(short_tmp_path / "c"),
    }
    try:
        done = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", "\n".join(blocks)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        subprocess.run([sys.executable, "-m", "bigsci_launch", "cluster", "down"], env=environment, check=True)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if re.fullmatch(r"n\d", line)) == sorted(
        ["n0", "n1", "n2", "n3"] * 2
    )
    assert re.search(r"n2 +10\.213\.\d+\.12 +\S+ +ended", done.stdout)
    assert not (short_tmp_path / "c").exists()
