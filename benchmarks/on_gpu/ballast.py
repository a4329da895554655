"""Memory of the card that somebody else holds: a process of its own, as another program on the card would be.

    python -m on_gpu.ballast

Each line that it reads is a number of bytes. It then holds all of the card but these, and prints how many bytes are
free. It holds nothing before the first line, and ends with its input.
"""

from __future__ import annotations

import select
import subprocess
import sys

LIMIT_S = 30.0
"""torch and a CUDA context start within it."""


class Ballast:
    """The process that holds memory, for the one that wants it held."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "on_gpu.ballast"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def leave(self, num_bytes: int) -> int:
        """Hold all of the card that is free, but `num_bytes`; return how many bytes are free then.

        Raises:
            RuntimeError: the process does not answer.
        """
        source, answers = self._process.stdin, self._process.stdout
        assert source is not None and answers is not None
        source.write(f"{num_bytes}\n")
        source.flush()
        can_answer, _, _ = select.select([answers], [], [], LIMIT_S)
        answer = answers.readline() if can_answer else ""
        if not answer:
            raise RuntimeError(f"the process that holds memory of the card did not answer in {LIMIT_S:.0f} s")
        return int(answer)

    def end(self) -> None:
        """End the process: the card has its memory back."""
        self._process.kill()
        self._process.wait(10)


def main() -> None:
    """Hold what the lines of stdin ask for."""
    import torch

    held: list[torch.Tensor] = []
    for line in sys.stdin:
        held.clear()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        held.append(torch.empty(max(0, free - int(line)), dtype=torch.uint8, device="cuda"))
        print(torch.cuda.mem_get_info()[0], flush=True)


if __name__ == "__main__":
    main()
