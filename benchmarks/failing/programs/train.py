"""A small training as people write it: `train.py --how WAY --rank N` fails at step 3 of rank N.

Ranks are those of torchrun, DeepSpeed or Slurm. With `--together tcp` they add a number over plain sockets at each
step, so that none can continue without another one; with `gloo`, torch does it.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from faults import FAULTS, note_truth

RANK = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
SIZE = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)
HUB = (os.environ.get("MASTER_ADDR", "127.0.0.1"), 7000 + int(os.environ.get("MASTER_PORT", "29500")) % 20000)
Sum = Callable[[float], float]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="none")
    parser.add_argument("--rank", type=int, nargs="*", default=[], help="who fails")
    parser.add_argument("--on", metavar="NODE", help="all ranks of this node fail")
    parser.add_argument("--at", type=int, default=3)
    parser.add_argument("--then", nargs=2, default=None, metavar=("RANK", "HOW"), help="who fails one second later")
    parser.add_argument("--survives", type=int, default=-1, help="a rank that handles an exception at step 1")
    parser.add_argument("--together", default="none", choices=("none", "tcp", "gloo"))
    parser.add_argument("--before", default="none", help="what happens before the ranks meet")
    parser.add_argument("--monitored", action="store_true", help="a monitored barrier before each sum")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-s", type=float, default=0.3)
    parser.add_argument("--style", default="print", choices=("print", "logging", "rank0", "records"))
    parser.add_argument("--loader", default="none", help="a DataLoader, and what its worker does at step 3")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    say = speaker_of(options.style)
    say(f"starting on {socket.gethostname()} with {SIZE} ranks")
    if is_chosen(options) and options.before != "none":
        fail(options.before)
    add = {"none": lambda: float, "tcp": join_hub, "gloo": lambda: join_gloo(options)}[options.together]()
    batches = loader_of(options)
    for step in range(1, options.steps + 1):
        if options.survives == RANK and step == 1:
            survive(say)
        if step == options.at:
            fail_if_due(options)
        next(batches)
        loss = add(1.0 / (step + RANK + 1))
        say(f"step {step}/{options.steps} loss {loss:.4f}")
        time.sleep(options.step_s)
    say("done")


def is_chosen(options: argparse.Namespace) -> bool:
    return RANK in options.rank or options.on == socket.gethostname()


def fail(how: str) -> None:
    note_truth(RANK, how)
    FAULTS[how]()


def fail_if_due(options: argparse.Namespace) -> None:
    if is_chosen(options) and options.how in FAULTS:
        fail(options.how)
    if options.then and int(options.then[0]) == RANK:
        time.sleep(1.5)
        FAULTS[options.then[1]]()


def speaker_of(style: str) -> Callable[[str], None]:
    if style in ("logging", "records"):
        form = "%(asctime)s %(levelname)s " + (f"[rank {RANK}] " if style == "records" else "") + "%(message)s"
        logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
        if style == "records":
            sys.excepthook = lambda kind, error, calls: logging.critical("uncaught", exc_info=(kind, error, calls))
        return logging.info
    if style == "rank0" and RANK != 0:
        return lambda text: None
    return lambda text: print(text, flush=True)


def survive(say: Callable[[str], None]) -> None:
    try:
        FAULTS["unreadable"]()
    except OSError:
        traceback.print_exc()
        say("cannot read a shard, using the next one")


def loader_of(options: argparse.Namespace) -> object:
    if options.loader == "none" or not is_chosen(options):
        return iter(range(options.steps + 1))
    from loading import batches

    return batches(options.loader, options.at)


def join_hub() -> Sum:
    """Meet at rank 0, which adds what all send."""
    if RANK == 0:
        server = socket.create_server(("", HUB[1]))
        peers = [server.accept()[0] for _ in range(SIZE - 1)]
        return lambda value: hub_sum(peers, value)
    for _ in range(100):
        try:
            peer = socket.create_connection(HUB)
            break
        except OSError:
            time.sleep(0.2)
    return lambda value: peer_sum(peer, value)


def hub_sum(peers: list[socket.socket], value: float) -> float:
    total = value + sum(receive(peer) for peer in peers)
    for peer in peers:
        peer.sendall(struct.pack("d", total))
    return total


def peer_sum(peer: socket.socket, value: float) -> float:
    peer.sendall(struct.pack("d", value))
    return receive(peer)


def receive(peer: socket.socket) -> float:
    block = peer.recv(8, socket.MSG_WAITALL)
    if len(block) < 8:
        raise ConnectionResetError(104, "Connection reset by peer")
    return float(struct.unpack("d", block)[0])


def join_gloo(options: argparse.Namespace) -> Sum:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=RANK, world_size=SIZE, timeout=timedelta(seconds=options.timeout))

    def add(value: float) -> float:
        if options.monitored:
            dist.monitored_barrier(timeout=timedelta(seconds=options.timeout))
        wrong = options.how in ("shape", "operation") and RANK in options.rank and add.calls == options.at
        add.calls += 1
        tensor = torch.full((5 if wrong and options.how == "shape" else 4,), value)
        if wrong:
            note_truth(RANK, options.how)
        if wrong and options.how == "operation":
            dist.broadcast(tensor, src=0)
        else:
            dist.all_reduce(tensor)
        return float(tensor[0])

    add.calls = 1
    return add


if __name__ == "__main__":
    main()
