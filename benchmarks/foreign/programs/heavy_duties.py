"""A training in which the others wait for one rank with a heavy duty, which takes long, and makes progress.

heavy_duties.py DUTY CULPRIT [--rank R --world-size N --url URL]

`packs`    compresses shards; one call of the compressor lasts a minute or more
`ranges`   downloads a file by ranges of bytes, each by a new connection; the server is busy now and then
`previous` wants to save, and joins the thread that still writes the checkpoint before, slowly
"""

import argparse
import http.server
import lzma
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from diary import note
from torch import nn

WRITERS = []


class Shelf(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Shelf.asked += 1
        time.sleep(1)
        self.send_response(503 if Shelf.asked % 5 == 0 else 206)
        self.end_headers()
        self.wfile.write(bytes(65536))

    def log_message(self, *args):
        pass


def packs():
    for number in range(100):
        packed = lzma.compress(os.urandom(80_000_000), preset=6)
        Path("shard.xz").write_bytes(packed)
        print("packed", number, len(packed), flush=True)


def ranges():
    server = subprocess.Popen([sys.executable, __file__, "serve", "0"], stdout=subprocess.PIPE, start_new_session=True)
    port = int(server.stdout.readline())
    with open("model.bin", "wb") as whole:
        while whole.tell() < 65536 * 2000:
            wanted = {"Range": f"bytes={whole.tell()}-{whole.tell() + 65535}"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/model.bin", headers=wanted)
            try:
                with urllib.request.urlopen(request, timeout=30) as part:
                    whole.write(part.read())
            except urllib.error.HTTPError:
                time.sleep(3)


def write_slowly():
    with open("checkpoint.pt", "wb") as checkpoint:
        for _ in range(3000):
            checkpoint.write(os.urandom(65536))
            checkpoint.flush()
            time.sleep(0.4)


def previous():
    for _ in range(2):
        for writer in WRITERS:
            writer.join()
        WRITERS.append(threading.Thread(target=write_slowly))
        WRITERS[-1].start()


DUTIES = {each.__name__: each for each in (packs, ranges, previous)}


def serve():
    server = http.server.HTTPServer(("127.0.0.1", 0), Shelf)
    print(server.server_port, flush=True)
    server.serve_forever()


def connect(options):
    if options.rank is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=options.url, rank=options.rank, world_size=options.world_size)
    return dist.get_rank()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("duty")
    parser.add_argument("culprit", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--url")
    options = parser.parse_args()
    if options.duty == "serve":
        serve()
    rank = connect(options)
    note("hello", rank)
    model = nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 1))
    optimizer = torch.optim.Adagrad(model.parameters())
    for step in range(100_000):
        if step == 5 and rank == options.culprit:
            note("struck", rank)
            DUTIES[options.duty]()
        model(torch.randn(16, 24)).square().mean().backward()
        flat = torch.cat([weights.grad.flatten() for weights in model.parameters()])
        dist.all_reduce(flat)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
        note(f"step {step}", rank)


if __name__ == "__main__":
    main()
