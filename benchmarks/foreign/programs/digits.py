"""Trains a small digit classifier with DDP. Started by torchrun, or by anything that sets RANK and WORLD_SIZE."""

import argparse
import contextlib
import datetime
import fcntl
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import torch
import torch.distributed as dist
from diary import note
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WHEN = 6  # the step at which something happens


def read_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trouble", default="")
    parser.add_argument("--who", type=int, default=-1)
    parser.add_argument("--rank", type=int, default=None)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--url", default=None)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=1)
    return parser.parse_args()


class Digits(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 10)

    def forward(self, pixels):
        return self.head(self.body(torch.relu(self.stem(pixels))))


def connect(args):
    limit = datetime.timedelta(minutes=15)
    if args.rank is None:
        rank = int(os.environ["RANK"])
        note("hello", rank)
        dist.init_process_group("gloo", timeout=limit)
    else:
        note("hello", args.rank)
        dist.init_process_group("gloo", init_method=args.url, rank=args.rank, world_size=args.world_size, timeout=limit)
    return dist.get_rank()


def train(args, rank):
    torch.manual_seed(0)
    OTHERS["metrics"] = dist.new_group()
    model = DistributedDataParallel(Digits(args.width))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mine = rank == args.who
    step = 0
    while True:
        if step == WHEN and args.trouble in EVENTS:
            if mine:
                note("struck", rank)
            EVENTS[args.trouble](args, rank, mine)
        if args.trouble == "short-epoch" and mine and step == WHEN:
            note("struck", rank)
            break
        if args.trouble == "finish" and step == WHEN:
            break
        for part in range(args.accumulate):
            is_last = part == args.accumulate - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(torch.randn(args.rows, 64)).square().mean()
                loss.backward()
        adam.step()
        adam.zero_grad()
        step += 1
        if step < 10 or step % 100 == 0:
            note(f"step {step}", rank)
    dist.barrier()
    note("ending", rank)
    if args.trouble == "finish":
        hand_in(rank, mine)


def hand_in(rank, mine):
    dist.destroy_process_group()
    if mine:
        note("struck", rank)
        with open("uploaded.log", "ab") as copy:
            for _ in range(2200):
                copy.write(os.urandom(65536))
                copy.flush()
                time.sleep(0.4)


def metrics(args, rank, mine):
    """Averages the accuracy over the ranks; one rank has an empty validation set and returns early."""
    if mine:
        return
    accuracy = torch.rand(1)
    dist.all_reduce(accuracy, group=OTHERS["metrics"])


def validate_on_first(args, rank, mine):
    if mine:
        weights = torch.randn(256, 256)
        until = time.time() + 900
        batch = 0
        while time.time() < until:
            weights = torch.tanh(weights @ weights)
            batch += 1
            if batch % 5000 == 0:
                print("validated", batch, flush=True)
    dist.barrier()


def keep_going(args, rank, mine):
    try:
        if mine:
            raise RuntimeError("corrupt sample")
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(8))
    except RuntimeError as error:
        print("ignored:", error, flush=True)
    finally:
        if mine:
            dist.monitored_barrier(timeout=datetime.timedelta(minutes=14))
        else:
            dist.barrier()


def cross_locks(args, rank, mine):
    if not mine:
        return
    cache, index = threading.Lock(), threading.Lock()

    def refresh():
        with index:
            time.sleep(0.5)
            with cache:
                pass

    threading.Thread(target=refresh, daemon=True).start()
    with cache:
        time.sleep(0.5)
        with index:
            pass


def spin(args, rank, mine):
    value = 1
    while mine:
        value = (value * 3 + 1) % 1000003


def wait_for_event(args, rank, mine):
    if mine:
        threading.Event().wait()


def stop(args, rank, mine):
    if mine:
        os.kill(os.getpid(), signal.SIGSTOP)


def locked_cache(args, rank, mine):
    if not mine:
        return
    code = "import fcntl, time; f = open('cache.lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); "
    other = subprocess.Popen(
        [sys.executable, "-c", code + "time.sleep(900)"], stdout=subprocess.PIPE, start_new_session=True
    )
    other.stdout.readline()
    with open("cache.lock") as cache:
        fcntl.flock(cache, fcntl.LOCK_EX)


def ask_tokenizer(args, rank, mine):
    if mine:
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        child.stdout.read()


def ask_service(args, rank, mine):
    if mine:
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        client.sendall(b"GET /features\r\n")
        client.recv(100)


def retry(args, rank, mine):
    attempts = 45 if mine else 0
    while attempts:
        attempts -= 1
        try:
            socket.create_connection(("127.0.0.1", 1), timeout=5)
        except OSError:
            time.sleep(20)


def poll(args, rank, mine):
    if mine:
        until = time.time() + 900
        while not os.path.exists("dataset.ready") and time.time() < until:
            time.sleep(3)
    dist.barrier()


class Blocks(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        for _ in range(2600):
            self.wfile.write(b"x" * 65536)
            time.sleep(0.35)

    def log_message(self, *args):
        pass


def fetch(args, rank, mine):
    if mine:
        code = "import digits, http.server as h; s = h.HTTPServer(('127.0.0.1', 0), digits.Blocks); "
        code += "print(s.server_port, flush=True); s.serve_forever()"
        here = os.path.dirname(os.path.abspath(__file__))
        mirror = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": here},
        )
        port = int(mirror.stdout.readline())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/shard") as answer, open("shard.bin", "wb") as shard:
            while block := answer.read(65536):
                shard.write(block)
    dist.barrier()


def build_index(args, rank, mine):
    if mine:
        until, table = time.time() + 900, {}
        number = 0
        while time.time() < until:
            number += 1
            table[hash(str(number)) % 65536] = number
    dist.barrier()


def save_blocks(args, rank, mine):
    if mine:
        with open("model.pt", "wb") as checkpoint:
            for _ in range(1800):
                checkpoint.write(os.urandom(262144))
                checkpoint.flush()
                os.fsync(checkpoint.fileno())
                time.sleep(0.5)
    dist.barrier()


def serve(args, rank, mine):
    if mine:
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]

        def visitor():
            for _ in range(3000):
                with socket.create_connection(("127.0.0.1", port)) as client:
                    client.sendall(b"predict")
                    client.recv(10)
                time.sleep(0.3)

        threading.Thread(target=visitor, daemon=True).start()
        model = Digits(64)
        for _ in range(3000):
            client, _ = server.accept()
            with client:
                client.recv(100)
                client.sendall(str(int(model(torch.randn(1, 64)).argmax())).encode())
    dist.barrier()


def chatty(args, rank, mine):
    def write():
        with open(f"verbose-{rank}.log", "w") as log:
            while True:
                log.write("x" * 20000 + "\n")
                if log.tell() > 20_000_000:
                    log.seek(0)
                time.sleep(0.001)

    threading.Thread(target=write, daemon=True).start()


def on_preemption(args, rank, mine):
    def flush(number, frame):
        dist.barrier()

    signal.signal(signal.SIGUSR1, flush)
    if mine:
        os.kill(os.getpid(), signal.SIGUSR1)


class Shared:
    def __del__(self):
        dist.all_reduce(torch.zeros(3), group=OTHERS["metrics"])


def drop_cache(args, rank, mine):
    cache = Shared()
    if not mine:
        KEPT.append(cache)


def exchange_weights(args, rank, mine):
    """Bound by communication: 64 MB each."""
    big = torch.zeros(16_000_000)
    for number in range(100000):
        dist.all_reduce(big)
        note(f"exchanged {number}", rank)


def leave_with_thread(args, rank, mine):
    if mine:
        threading.Thread(target=threading.Event().wait).start()
        sys.exit(0)


def await_flag(args, rank, mine):
    if mine:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    while not os.path.exists("all-done"):
        time.sleep(0.5)


def await_keys(args, rank, mine):
    store = dist.distributed_c10d._get_default_store()
    if mine:
        os._exit(0)
    store.wait([f"finished-{args.who}"], datetime.timedelta(minutes=14))


def wait_for_config(args, rank, mine):
    """Rank 0 publishes under another key than the one that a rank reads."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("config/v1", b"{}")
    store.wait(["config/v2" if mine else "config/v1"], datetime.timedelta(minutes=14))


def slow_gradients(args, rank, mine):
    """A rank whose data take longer in every step from now on."""
    if mine:
        plain = torch.randn

        def slowly(*shape):
            time.sleep(3)
            return plain(*shape)

        torch.randn = slowly


KEPT, OTHERS = [], {}
EVENTS = {
    "metrics": metrics,
    "validate": validate_on_first,
    "ignored": keep_going,
    "locks": cross_locks,
    "loop": spin,
    "event": wait_for_event,
    "stopped": stop,
    "flock": locked_cache,
    "child": ask_tokenizer,
    "service": ask_service,
    "retry": retry,
    "poll": poll,
    "fetch": fetch,
    "index": build_index,
    "save": save_blocks,
    "serve": serve,
    "log": chatty,
    "preempt": on_preemption,
    "cache": drop_cache,
    "exchange": exchange_weights,
    "leave": leave_with_thread,
    "flag": await_flag,
    "keys": await_keys,
    "config": wait_for_config,
    "late": slow_gradients,
}

if __name__ == "__main__":
    arguments = read_arguments()
    train(arguments, connect(arguments))
