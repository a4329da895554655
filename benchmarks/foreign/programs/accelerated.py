"""Fine-tuning with Hugging Face accelerate, on CPU."""

import argparse
import time

import torch
from accelerate import Accelerator
from diary import note
from torch.utils.data import DataLoader, TensorDataset


def report_samples(accelerator, predictions):
    """Looks at the predictions; only one process asks for those of all."""
    return accelerator.gather(predictions)


def run_evaluation(seconds):
    until = time.time() + seconds
    scores = torch.zeros(1)
    while time.time() < until:
        scores += torch.linalg.svdvals(torch.randn(80, 80)).mean()
    return scores


def training_function(options):
    accelerator = Accelerator(cpu=True)
    index = accelerator.process_index
    note("hello", index)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
    data = DataLoader(TensorDataset(torch.randn(4096, 32)), batch_size=16)
    net, optimizer, data = accelerator.prepare(net, torch.optim.Adam(net.parameters()), data)
    seen = 0
    while True:
        for (rows,) in data:
            with accelerator.accumulate(net):
                output = net(rows)
                accelerator.backward((output - rows).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
            seen += 1
            if seen < 10 or seen % 100 == 0:
                note(f"step {seen}", index)
            if seen == 8 and options.mode and index == options.process:
                note("struck", index)
                if options.mode == "gather-alone":
                    report_samples(accelerator, output.detach())
                if options.mode == "evaluate":
                    run_evaluation(900)
                if options.mode == "wait":
                    accelerator.wait_for_everyone()
                if options.mode == "prompt":
                    with open("answers.fifo") as answers:
                        answers.readline()
        accelerator.wait_for_everyone()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="")
    parser.add_argument("--process", type=int, default=-1)
    arguments = parser.parse_args()
    if arguments.mode == "prompt":
        import contextlib
        import os

        with contextlib.suppress(FileExistsError):
            os.mkfifo("answers.fifo")
    training_function(arguments)
