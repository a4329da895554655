"""Two ranks over gloo, of which the culprit cannot run Python, and the other waits for it in a collective.

    python held_gil.py DEVICE FOLDER MODE TIMEOUT_S CULPRIT

MODE is thread (a thread of the culprit holds the GIL in C) or child (a forked child of it holds its own GIL in C, and
the culprit waits for the child). The culprit uses the device before.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
from multiprocessing.process import BaseProcess

import torch
from collectives import CULPRIT, form_group, join_store, reduce_gradients
from stage import DEVICE, LONG_S, MODE, RANK, say_ready


def hold_the_gil() -> None:
    say_ready()
    ctypes.PyDLL(None).sleep(LONG_S)


def compute(values: torch.Tensor) -> None:
    while True:
        values.add_(1)
        if DEVICE == "cuda":
            torch.cuda.synchronize()


def wait_for_the_child(child: BaseProcess) -> None:
    child.join()


def stall(values: torch.Tensor) -> None:
    if MODE == "thread":
        threading.Thread(target=hold_the_gil, name="native", daemon=True).start()
        compute(values)
    child = multiprocessing.get_context("fork").Process(target=hold_the_gil)
    child.start()
    wait_for_the_child(child)


def main() -> None:
    form_group(join_store())
    values = torch.ones(1, device=DEVICE)
    reduce_gradients(values)
    if RANK == CULPRIT:
        stall(values)
    say_ready()
    reduce_gradients(values)


if __name__ == "__main__":
    main()
