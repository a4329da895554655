"""Reinforcement learning: rank 0 generates samples and broadcasts them, all ranks learn from them."""

import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from diary import note


def generate(policy, seconds):
    """Sample tokens one by one."""
    state, tokens = torch.zeros(1, 64), []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        state = torch.tanh(policy(state) + torch.randn(1, 64))
        tokens.append(state.argmax().item())
    return torch.tensor((tokens + [0] * 64)[:64])


def ask_reward_model():
    with socket.create_server(("127.0.0.1", 0)) as quiet, socket.create_connection(quiet.getsockname()) as question:
        question.sendall(b"score")
        return question.recv(8)


def learn(policy, optimizer, tokens):
    loss = policy(torch.nn.functional.one_hot(tokens, 64).float()).pow(2).mean()
    loss.backward()
    for weight in policy.parameters():
        dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()


def main(plot, actor, seconds):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    note("hello", rank)
    policy = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    for episode in range(10**9):
        tokens = torch.zeros(64, dtype=torch.long)
        if rank == 0:
            if episode == 4 and plot == "reward":
                note("struck", rank)
                ask_reward_model()
            tokens = generate(policy, seconds)
        if episode == 4 and plot == "stale" and rank == actor:
            note("struck", rank)
            learn(policy, optimizer, tokens)
        if episode == 4 and plot == "again" and rank == actor:
            note("struck", rank)
            dist.broadcast(tokens, src=0)
        dist.broadcast(tokens, src=0)
        learn(policy, optimizer, tokens)
        if episode < 10 or episode % 50 == 0:
            note(f"step {episode}", rank)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
