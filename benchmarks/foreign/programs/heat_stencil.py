"""Heat equation on a strip for each MPI rank: halo exchange, residual, steering parameters from rank 0.

mpirun -n 4 python heat_stencil.py --trouble none
"""

import argparse
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
from diary import note
from mpi4py import MPI

COMM = MPI.COMM_WORLD
ME, SIZE = COMM.Get_rank(), COMM.Get_size()


def say(text: str) -> None:
    print(f"rank {ME} {text}", flush=True)
    note(text, ME)


def exchange_halo(field: np.ndarray, tag: int) -> None:
    up, down = (ME - 1) % SIZE, (ME + 1) % SIZE
    COMM.Sendrecv(field[1].copy(), dest=up, sendtag=tag, recvbuf=field[-1], source=down, recvtag=tag)
    COMM.Sendrecv(field[-2].copy(), dest=down, sendtag=tag, recvbuf=field[0], source=up, recvtag=tag)


def relax(field: np.ndarray) -> float:
    new = 0.25 * (field[:-2, 1:-1] + field[2:, 1:-1] + field[1:-1, :-2] + field[1:-1, 2:])
    change = float(np.abs(new - field[1:-1, 1:-1]).max())
    field[1:-1, 1:-1] = new
    return change


def steering(step: int) -> float:
    """Rank 0 decides on the factor of relaxation."""
    factor = np.array([1.0 + 0.01 * step])
    COMM.Bcast(factor, root=0)
    return float(factor[0])


def global_residual(change: float) -> float:
    total = np.zeros(1)
    COMM.Allreduce(np.array([change]), total, op=MPI.MAX)
    return float(total[0])


def write_snapshot(field: np.ndarray, folder: Path, seconds: float) -> None:
    """Write the field in text, block by block, to a slow disk."""
    end = time.monotonic() + seconds
    with (folder / "snapshot.txt").open("w") as file:
        while time.monotonic() < end:
            np.savetxt(file, field)
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.1)


def integrate_source_term(seconds: float) -> float:
    end, total = time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        total += sum(x * x for x in range(20_000))
    return total


def read_probe(folder: Path) -> bytes:
    fifo = folder / "probe"
    os.mkfifo(fifo)
    return fifo.read_bytes()


def ask_license_server() -> bytes:
    server = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(server.getsockname()) as line:
        line.sendall(b"checkout solver\n")
        return line.recv(100)


def refine_until_converged() -> None:
    error = 1.0
    while error > 0.5:
        error = 1.0 if error < 2 else error / 2


def wait_for_mesh(folder: Path) -> None:
    while not (folder / "mesh.bin").exists():
        time.sleep(1.0)


def disturb(trouble: str, field: np.ndarray, folder: Path) -> None:
    """What happens on the chosen rank before the exchange of this step."""
    if trouble == "snapshot":
        write_snapshot(field, folder, 400)
    elif trouble == "source":
        integrate_source_term(400)
    elif trouble == "probe":
        read_probe(folder)
    elif trouble == "license":
        ask_license_server()
    elif trouble == "refine":
        refine_until_converged()
    elif trouble == "mesh":
        wait_for_mesh(folder)
    elif trouble == "paused":
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trouble", default="none")
    parser.add_argument("--at", type=int, default=2, help="rank")
    parser.add_argument("--from-step", type=int, default=5)
    parser.add_argument("--think", type=float, default=0.02, help="seconds for each step")
    parser.add_argument("--folder", type=Path, default=Path("."))
    options = parser.parse_args()
    note("hello", ME)
    field = np.random.default_rng(ME).random((34, 34))
    for step in range(1_000_000):
        is_odd = options.at == ME and step == options.from_step
        trouble = options.trouble if is_odd else "none"
        if trouble != "none":
            note("struck", ME)
        disturb(trouble, field, options.folder)
        if trouble == "converged":
            break
        tag = 7 if trouble == "tag" else 3
        exchange_halo(field, tag)
        if options.think:
            time.sleep(options.think)
        change = relax(field)
        if trouble == "steer-first":
            steering(step)
        residual = 0.0 if trouble == "no-residual" else global_residual(change)
        steering(step)
        say(f"step {step} ended, residual {residual:.3f},")


if __name__ == "__main__":
    main()
