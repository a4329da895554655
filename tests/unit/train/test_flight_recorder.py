"""The server of torch's flight recorder: it can be ended at any time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

STARTED_AND_ENDED = """
import os, sys
from pathlib import Path
from bigsci_launch.train.rank.flight_recorder import _start_server
os.umask(0)
for number in range(50):
    server = _start_server(Path(sys.argv[1]))
    assert os.stat(sys.argv[1]).st_mode & 0o777 == 0o600, "others may connect to it"
    server.shutdown()
assert os.umask(0) == 0
print("all ended")
os._exit(0)
"""


@pytest.mark.slow
def test_a_server_that_has_just_started_can_be_ended(tmp_path: Path) -> None:
    """torch's own `shutdown` waits for ever, with the GIL held, until the server's thread listens."""
    command = [sys.executable, "-c", STARTED_AND_ENDED, str(tmp_path / "socket")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "all ended\n", done.stderr[-500:]
