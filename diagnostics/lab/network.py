"""Family E: the link between two sets of ranks. See step_loop.py, and stages.py, which creates the link."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from step_loop import Training, main


class BigTensors(Training):
    """Reduces, once per step, a tensor that fills the socket buffers."""

    def allreduce_gradients(self) -> None:
        super().allreduce_gradients()
        self.reduce_world()

    def reduce_world(self) -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1 << 18))


class LinkDown(BigTensors):
    """H80: the link between two sets of ranks goes down, and all ranks wait in the same collective."""

    def get_batch(self) -> Any:
        if self.strikes():
            self.command("ip", "link", "set", "dev", os.environ["BSL_LAB_LINK"], "down")
        return super().get_batch()

    def command(self, *argv: str) -> None:
        subprocess.run(argv, check=True)


class SmallPackets(LinkDown):
    """H81: small messages pass the link, but large ones are lost."""

    def command(self, *argv: str) -> None:
        subprocess.run([*argv[:-1], "mtu", "600"], check=True)


class SlowLink(LinkDown):
    """H82: not a hang: one link is slow."""

    def command(self, *argv: str) -> None:
        link = argv[4]
        limit = ("rate", "40mbit", "burst", "64kbit", "latency", "400ms")
        subprocess.run(["tc", "qdisc", "add", "dev", link, "root", "tbf", *limit], check=True)


RECIPES: dict[str, type[Training]] = {
    "link-down": LinkDown,
    "small-packets": SmallPackets,
    "slow-link": SlowLink,
}

if __name__ == "__main__":
    main(RECIPES)
