"""DeepSpeed ZeRO on CPU; the stage is an argument."""

import argparse
import os
import socket
import threading

import deepspeed
import torch
from diary import note


def settings(stage):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20000},
        "zero_allow_untested_optimizer": True,
    }


def loop(engine, rank, options):
    done = 0
    mutex = threading.Lock()
    while True:
        if done == 5 and rank == options.victim and options.accident:
            note("struck", rank)
            if options.accident == "mutex":
                mutex.acquire()
                mutex.acquire()
            if options.accident == "save-alone":
                engine.save_checkpoint("out")
            if options.accident == "barrier-alone":
                deepspeed.comm.barrier()
            if options.accident == "license":
                door = socket.create_server(("127.0.0.1", 0))
                door.accept()
        rows = torch.randn(4, 48)
        loss = engine(rows).square().mean()
        engine.backward(loss)
        engine.step()
        done += 1
        if done < 10 or done % 50 == 0:
            note(f"step {done}", rank)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--accident", default="")
    parser.add_argument("--victim", type=int, default=-1)
    parser.add_argument("--local_rank", type=int, default=0)
    arguments = parser.parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes minutes to compile
    deepspeed.init_distributed("gloo")
    number = int(os.environ["RANK"])
    note("hello", number)
    network = torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(4)))
    built, *_ = deepspeed.initialize(
        model=network, model_parameters=network.parameters(), config=settings(arguments.stage)
    )
    loop(built, number, arguments)
