"""Family G: runs that must not be mistaken for a hang. See step_loop.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from step_loop import REST_S, Training, main


class Healthy(Training):
    """A training in which nothing is wrong."""

    def train_step(self) -> None:
        self.strikes()
        super().train_step()


class Straggler(Training):
    """H100: one rank sleeps for a while in every step."""

    DELAY_S = 0.4

    def get_batch(self) -> Any:
        if self.step >= self.options.step and self.is_rank():
            self.read_batch()
        return super().get_batch()

    def read_batch(self) -> None:
        time.sleep(self.DELAY_S)


class BusyStraggler(Straggler):
    """H101: one rank computes for a while in every step."""

    def read_batch(self) -> None:
        end = time.monotonic() + self.DELAY_S
        while time.monotonic() < end:
            self.tokenise()

    def tokenise(self) -> int:
        return sum(range(1000))


class Starved(Healthy):
    """H54: all ranks share one core with other processes."""

    def before_init(self) -> None:
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        if self.rank == self.culprit:
            code = f"import time\nend = time.time() + {REST_S}\nwhile time.time() < end: pass"
            for _ in range(2):
                subprocess.Popen([sys.executable, "-I", "-S", "-c", code])


class WarmUp(Training):
    """H103: the first steps compile, on all ranks."""

    def forward_step(self, batch: Any) -> Any:
        if self.step >= 1:
            self.note("struck")
            self.compile_fx()
        return super().forward_step(batch)

    def compile_fx(self) -> None:
        end = time.monotonic() + 2.0
        node = 0
        while time.monotonic() < end:
            node += self.lower(node)

    def lower(self, node: int) -> int:
        return len(sorted(str(node) * 50))


class Evaluation(Training):
    """H104: one rank evaluates, and the others wait for it in a barrier, as they should."""

    def training_log(self) -> None:
        super().training_log()
        if self.has_come():
            self.evaluate_and_print_results()

    def evaluate_and_print_results(self) -> None:
        import torch.distributed as dist

        self.enter("eval")
        if self.is_rank():
            self.evaluate()
        dist.barrier()

    def evaluate(self) -> None:
        import torch

        end = time.monotonic() + REST_S
        while time.monotonic() < end:
            torch.mm(self.weight, self.weight)


class SlowTeardown(Training):
    """H105: the training has finished, and one rank takes long to end."""

    def pretrain(self) -> None:
        self.options.steps = self.options.step
        super().pretrain()
        if self.is_rank():
            self.upload_logs()

    def upload_logs(self) -> None:
        time.sleep(REST_S)


class Leaving(Training):
    """H105: the ranks end one after another while `bsl spy` looks."""

    def pretrain(self) -> None:
        self.options.steps = self.options.step
        super().pretrain()
        self.note("struck")
        time.sleep(0.5 + 0.4 * self.rank)


class Finished(Training):
    """All ranks have ended well."""

    def pretrain(self) -> None:
        self.options.steps = self.options.step
        super().pretrain()
        self.note("struck")


class SilentLog(Healthy):
    """H106: the log is silent, and the steps continue."""

    def training_log(self) -> None:
        if not self.step > 3:
            super().training_log()


RECIPES: dict[str, type[Training]] = {
    "healthy": Healthy,
    "straggler": Straggler,
    "straggler-busy": BusyStraggler,
    "starved": Starved,
    "warm-up": WarmUp,
    "evaluation": Evaluation,
    "slow-teardown": SlowTeardown,
    "leaving": Leaving,
    "finished": Finished,
    "silent-log": SilentLog,
}

if __name__ == "__main__":
    main(RECIPES)
