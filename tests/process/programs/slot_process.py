"""A process of a slot: waits for a rank, serves it in steps, and leaves it when its generation ends.

    python slot_process.py [deaf] [slow SECONDS] [exit CODE]

Standard library only. `deaf`: it does not leave when it is told to. `slow`: it takes so
long to leave, twice. `exit`: it fails after its first step.
"""

import json
import os
import socket
import sys
import time


def main(words: list) -> None:
    channel = socket.socket(fileno=int(os.environ["BSL_SLOT_FD"]))
    orders = channel.makefile("r")

    def say(word: str, **fields: object) -> None:
        channel.sendall(json.dumps({"word": word, **fields}).encode() + b"\n")

    print("starts", sorted(name for name in ("RANK", "MASTER_ADDR", "BSL_CONTROLLER_TOKEN") if name in os.environ))
    say("warm")
    while True:
        line = orders.readline()
        if not line:
            os._exit(1)
        order = json.loads(line)
        if order["do"] == "begin":
            print("begins", order["generation"], order["rank"], os.getpid(), flush=True)
            say("joined", generation=order["generation"], seconds=0.1)
            say("stepped", generation=order["generation"], step=10 * order["generation"])
            if "exit" in words:
                say("final", text="no use")
                sys.exit(int(words[-1]))
        elif "deaf" in words:
            time.sleep(600)
        else:
            if "slow" in words:
                time.sleep(float(words[-1]))
                say("leaving")
                time.sleep(float(words[-1]))
            print("leaves", order["generation"], flush=True)
            say("left", generation=order["generation"], step=7, seconds=0.2)


main(sys.argv[1:])
