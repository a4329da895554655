"""Which errors only say that another rank is gone."""

from __future__ import annotations

import pytest

from bigsci_launch.lost_peer import says_lost_peer
from bigsci_launch.train.rank.events import is_lost_peer

LOST = (
    RuntimeError(
        "[pair.cc:553] Connection closed by peer [10.0.0.3]:23436. This is typically caused by a remote worker"
    ),
    RuntimeError("[pair.cc:460] Read error [10.0.0.3]:23436: Connection reset by peer"),
    RuntimeError("[pair.cc:142] Writing: Socket closed [10.0.0.3]:23436"),
    RuntimeError("NCCL error: remote process exited or there was a network error, NCCL version 2.21.5"),
    RuntimeError("socketProgress: Connection closed by remote peer iam12<40123>"),
    RuntimeError("failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"),
    ConnectionResetError(104, ""),
    BrokenPipeError(32, "Broken pipe"),
    ConnectionRefusedError(111, "Connection refused"),
    OSError(113, "No route to host"),
    RuntimeError(
        "[PG ID 0 PG GUID 0(default_pg) Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, "
        "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
    ),
    RuntimeError("NCCL communicator was aborted on rank 3."),
    RuntimeError("NCCL communicator was aborted on rank 3.  Original reason for failure was: watchdog timeout"),
    RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error (run with NCCL_DEBUG=INFO for details), "
        "NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or "
        "device error.\nLast error:\nsocketPollConnect: connect to 10.0.0.3<41234> returned Connection timed out"
    ),
    RuntimeError("Timed out waiting 1800000ms for recv operation to complete"),
    RuntimeError("wait timeout after 600000ms, keys: /default_pg/0//cuda//0"),
    RuntimeError("Timed out after 601 seconds waiting for clients. 1/2 clients joined."),
)
OWN = (
    FloatingPointError("loss is NaN at step 12"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 512 vs 256."),
    TimeoutError("no answer to a connection in 300 s"),
    RuntimeError(
        "NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details)\nLast error:\n"
        "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"
    ),
    RuntimeError("NCCL error: unhandled cuda error, out of memory"),
)


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_peer_is_recognised_by_type_and_message(error: Exception) -> None:
    assert says_lost_peer(f"{type(error).__name__}: {error}")
    assert is_lost_peer(error)


@pytest.mark.parametrize("error", OWN, ids=str)
def test_a_failure_of_its_own_is_not_a_lost_peer(error: Exception) -> None:
    assert not is_lost_peer(error)
