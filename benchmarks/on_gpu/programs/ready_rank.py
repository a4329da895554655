"""A rank of `bsl train` that imports what it needs, and begins when a line comes on its standard input.

So it can be started while another rank is measured: it touches no device before.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bigsci_launch.config.load import load_resolved
from bigsci_launch.train import __main__
from bigsci_launch.train.rank.identity import this_attempt


def main() -> None:
    training = load_resolved(this_attempt().config).training
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    # As `start_torch` does; but that takes the device too.
    os.environ["DS_ACCELERATOR"] = training.device
    from bigsci_launch.train import startup

    startup.start_deepspeed()
    import bigsci_launch.train.loop  # noqa: F401

    if training.compile:
        _import_compiler(training.device)
    sys.stdin.readline()
    __main__.main()


def _import_compiler(device: str) -> None:
    import torch._inductor.config

    # Before `compile_fx` is imported, which starts workers.
    torch._inductor.config.compile_threads = 1
    import torch._inductor.compile_fx

    from bigsci_launch.train.device import compiler

    if device == "cpu":
        # Its compiler takes a minute there.
        compiler.BACKEND = "aot_eager"


if __name__ == "__main__":
    main()
