"""Runs a command once for each rank, as GNU parallel would: pool_of_ranks.py WORLD PORT COMMAND..."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor


def run_one(rank, world, port, command):
    words = [*command, "--rank", str(rank), "--world", str(world), "--meet", f"tcp://127.0.0.1:{port}"]
    return subprocess.call(words)


def main():
    world, port, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    with ThreadPoolExecutor(world) as pool:
        print(list(pool.map(lambda rank: run_one(rank, world, port, command), reversed(range(world)))))


if __name__ == "__main__":
    main()
