"""A process of a slot that takes a step every 50 ms: `python slot_steps.py FOLDER`.

It stays when its generation ends. When FOLDER/finish exists, it says that it has finished, and ends with 0, or waits
there if the file says `wait`. The rank that finds its number in FOLDER/leave takes the file away and ends with 0
without a word.
"""

import json
import os
import select
import socket
import sys
import time
from pathlib import Path


def main(folder: Path) -> None:
    channel = socket.socket(fileno=int(os.environ["BSL_SLOT_FD"]))
    received, generation, step, rank = b"", None, 0, None

    def say(word: str, **fields: object) -> None:
        channel.sendall(json.dumps({"word": word, "generation": generation, **fields}).encode() + b"\n")

    say("warm")
    while True:
        if select.select([channel], [], [], 0.05)[0]:
            data = channel.recv(65536)
            if not data:
                os._exit(1)
            *lines, received = (received + data).split(b"\n")
            for order in map(json.loads, lines):
                if order["do"] == "begin":
                    generation, rank = order["generation"], order["rank"]
                    say("joined", seconds=0.0)
                    say("restored", step=step, source="memory", why=None, seconds=0.0)
                else:
                    say("left", step=step, seconds=0.0)
                    generation = None
        elif generation is not None:
            step += 1
            say("stepped", step=step)
            if (folder / "leave").exists() and (folder / "leave").read_text() == str(rank):
                (folder / "leave").unlink()
                sys.exit(0)
            if (folder / "finish").exists():
                say("finished")
                if (folder / "finish").read_text() == "wait":
                    time.sleep(600)
                sys.exit(0)


main(Path(sys.argv[1]))
