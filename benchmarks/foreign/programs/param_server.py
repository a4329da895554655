"""Asynchronous training with a parameter server: rank 0 serves, the others send gradients and get weights."""

import os
import select
import sys
import threading

import torch
import torch.distributed as dist
from diary import note

SIZE = 2000


def serve_weights(workers, mischance):
    table, request, served = torch.zeros(SIZE), torch.zeros(SIZE), 0
    while True:
        sender = dist.recv(request)
        table -= 0.01 * request
        served += 1
        if served == 40 and mischance == "server":
            note("struck", 0)
            threading.Semaphore(0).acquire()
        dist.send(table, sender)
        if served < 20 or served % 500 == 0:
            note(f"step {served}", 0)


def work(rank, mischance, unlucky):
    weights, turn = torch.zeros(SIZE), 0
    while True:
        turn += 1
        if turn == 8 and rank == unlucky and mischance == "worker":
            note("struck", rank)
            reader, _ = os.pipe()
            select.select([reader], [], [])
        if turn == 8 and rank == unlucky and mischance == "no-push":
            note("struck", rank)
            dist.recv(weights, 0)
        gradient = torch.nn.functional.normalize(torch.randn(300, SIZE), dim=0).sum(0) + weights
        dist.send(gradient, 0)
        dist.recv(weights, 0)
        if turn < 10 or turn % 500 == 0:
            note(f"step {turn}", rank)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    number = dist.get_rank()
    note("hello", number)
    kind, place = sys.argv[1], int(sys.argv[2])
    if number == 0:
        serve_weights(dist.get_world_size() - 1, kind)
    else:
        work(number, kind, place)
