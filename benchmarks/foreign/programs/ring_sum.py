"""Four processes sum their vectors over sockets of their own: standard library only, for any interpreter of Python 3.

python ring_sum.py --world 4
"""

import argparse
import os
import socket
import struct
import subprocess
import sys
import time

from diary import note


def take(line, count):
    parts = b""
    while len(parts) < count:
        part = line.recv(count - len(parts))
        if not part:
            raise SystemExit("a neighbour has left")
        parts += part
    return parts


def meet(number, world):
    """Return the sockets to the next and from the previous process; ports are exchanged in files."""
    server = socket.create_server(("127.0.0.1", 0))
    with open(f"port-{number}.new", "w") as file:
        file.write(str(server.getsockname()[1]))
    os.rename(f"port-{number}.new", f"port-{number}")
    neighbour = f"port-{(number + 1) % world}"
    while not os.path.exists(neighbour):
        time.sleep(0.1)
    with open(neighbour) as file:
        ahead = socket.create_connection(("127.0.0.1", int(file.read())))
    return ahead, server.accept()[0]


def ring_sum(value, world, ahead, behind):
    total = passing = value
    for _ in range(world - 1):
        ahead.sendall(struct.pack("d", passing))
        passing = struct.unpack("d", take(behind, 8))[0]
        total += passing
    return total


def read_sensor(number):
    name = f"sensor-{number}"
    os.mkfifo(name)
    with open(name) as sensor:
        return sensor.read()


def work(number, options):
    note("hello", number)
    ahead, behind = meet(number, options.world)
    for step in range(10**9):
        if step == 5 and number == options.who and options.trouble != "none":
            note("struck", number)
            if options.trouble == "sensor":
                read_sensor(number)
            elif options.trouble == "settles":
                value = 1
                while value:
                    value = value * 5 % 7919
        ring_sum(float(step + number), options.world, ahead, behind)
        time.sleep(0.1)
        note(f"step {step} ended", number)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--number", type=int)
    parser.add_argument("--who", type=int, default=1)
    parser.add_argument("--trouble", default="none")
    options = parser.parse_args()
    if options.number is not None:
        work(options.number, options)
        return
    children = [subprocess.Popen([sys.executable, *sys.argv, "--number", str(n)]) for n in range(options.world)]
    for child in children:
        child.wait()


if __name__ == "__main__":
    main()
