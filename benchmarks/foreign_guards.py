"""Defects in training loops that are not ours, and what the guards in them say: `python benchmarks/foreign_guards.py`.

Each loop of `foreign_loops/` runs on two ranks without a defect, and with each defect that is possible in it. A defect
is found if the first finding is of the right step, names the right tensor and ranks, and the run ends.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent / "foreign_loops"
LOOPS = ("ddp", "accelerate_loop", "fsdp2", "deepspeed_zero1")
TIMEOUT_S = 240


@dataclass(frozen=True)
class LoopCase:
    """A loop with a defect, or without one if that is empty; `expected` is a pattern for the first finding."""

    loop: str
    defect: str
    expected: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoopOutcome:
    """What a case printed of findings, its exit codes and how long it took."""

    case: LoopCase
    findings: tuple[str, ...]
    codes: tuple[int, ...]
    seconds: float
    output: str

    @property
    def verdict(self) -> str:
        """`clean`, `found`, `SILENT`, `FALSE ALARM`, `WRONG` or `BROKEN`."""
        if not self.case.defect:
            return "FALSE ALARM" if self.findings else "clean" if not any(self.codes) else "BROKEN"
        if not self.findings:
            return "BROKEN" if any(self.codes) else "SILENT"
        is_right = re.search(self.case.expected, self.findings[0]) and all(self.codes)
        return "found" if is_right else "WRONG"


ONE = r"rank 1 \(dp1 pp0 tp0\)"
_SAME = r"step 4: data: batch on ranks 0-1: .*same samples"
_LR = r"step 4: optimizer settings: lr of optimizer group 0 on ranks 0-1: is 0.003 on rank 1 and 0.001 on rank 0"
_SHARD = r"shard 0 of optimizer group 0"
_ZEROED = rf"step 4: changed between steps: .*: exp_avg on {ONE}"
_NAN = rf"step 4: changed between steps: layers.1.up.weight on {ONE}"

EXPECTED: dict[str, dict[str, str]] = {
    "ddp": {
        "same-data": _SAME,
        "unreduced": r"step 4: gradient reduction: \S+weight on ranks 0-1: its gradient does not follow",
        "scaled": r"step 4: gradient reduction: \S+weight on ranks 0-1: its gradient is 8 times",
        "weight-apart": rf"step 4: changed between steps: layers.1.up.weight on {ONE}",
        "nan": _NAN,
        "moments-zeroed": _ZEROED,
        "moments-huge": _ZEROED,
        "step-reset": r"step 4: optimizer settings: step count of optimizer group 0 on ranks 0-1: is 1 on rank 1 and 4",
        "lr-apart": _LR,
        "replayed": r"step 4: data: batch on ranks 0-1: the samples of step 2 have been read again",
        "untied": r"step 4: .*(embedding|head).weight",
    },
    "accelerate_loop": {
        # The second of the two micro-batches of step 2.
        "same-data": _SAME.replace("step 4", "step 2"),
        "unreduced": r"step 4: gradient reduction: \S+weight on ranks 0-1: its gradient does not follow",
        "scaled-one": rf"step 4: gradient reduction: \S+weight on {ONE}: its gradient is 8 times",
        "weight-apart": rf"step 4: changed between steps: layers.1.up.weight on {ONE}",
        "moments-zeroed": _ZEROED,
        "lr-apart": _LR,
    },
    "fsdp2": {
        "same-data": _SAME,
        "unreduced": r"step 4: missing gradients: all gradients on ranks 0-1",
        "scaled": r"step 4: gradient reduction: \S+weight on ranks 0-1: its gradient is 8 times",
        "wrong-sum": r"step 4: gradient reduction: \S+weight on ranks 0-1: its gradient is 2 times",
        "weight-apart": rf"step 4: changed between steps: layers.1.up.weight on {ONE}",
        "nan": _NAN,
        "moments-zeroed": _ZEROED,
        "moments-huge": _ZEROED,
        "step-reset": r"step 4: optimizer settings: step count of optimizer group 0 on ranks 0-1: is 1 on rank 1 and 4",
        "lr-apart": _LR,
    },
    "deepspeed_zero1": {
        "same-data": _SAME,
        "unreduced": r"step 4: gradient reduction: \S+weight on ranks 0-1: its gradient does not follow",
        "weight-apart": rf"step 4: changed between steps: layers.1.up.weight on {ONE}",
        "nan": _NAN,
        "moments-zeroed": rf"step 4: changed between steps: {_SHARD}: exp_avg on {ONE}",
        "moments-huge": rf"step 4: changed between steps: {_SHARD}: exp_avg on {ONE}",
        "step-reset": r"step 4: optimizer settings: step count of optimizer group 0 on ranks 0-1: is 1 on rank 1 and 4",
        "lr-apart": _LR,
    },
}
HEALTHY = (("--interval", "1"), ("--interval", "auto", "--steps", "30"), ("--interval", "1", "--bf16", "--steps", "20"))


def cases() -> Iterator[LoopCase]:
    """Yield every case: each loop without a defect in three ways, then with each of its defects."""
    for loop in LOOPS:
        yield from (LoopCase(loop, "", "", arguments) for arguments in HEALTHY)
        yield from (LoopCase(loop, defect, expected) for defect, expected in EXPECTED[loop].items())


def run_case(case: LoopCase, ranks: int = 2) -> LoopOutcome:
    """Run a loop on this machine, and read what rank 0 printed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(HERE / f"{case.loop}.py"), *case.arguments]
    program += ["--defect", case.defect] if case.defect else []
    started = time.monotonic()
    processes = [
        subprocess.Popen(
            program,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    return judge(case, outputs, [process.returncode for process in processes], time.monotonic() - started)


def judge(case: LoopCase, outputs: Sequence[str], codes: Sequence[int], seconds: float) -> LoopOutcome:
    """Return what came of a case; `outputs` and `codes` are those of its ranks."""
    findings = tuple(line for line in outputs[0].splitlines() if line.startswith("guard: "))
    return LoopOutcome(case, findings, tuple(codes), seconds, "\n".join(outputs))


def table(outcomes: Sequence[LoopOutcome]) -> str:
    """Return the outcomes as a table in Markdown."""
    rows = ["| loop | defect | verdict | first finding |", "|---|---|---|---|"]
    for outcome in outcomes:
        name = outcome.case.defect or f"none ({' '.join(outcome.case.arguments)})"
        first = outcome.findings[0].removeprefix("guard: ") if outcome.findings else ""
        rows.append(f"| {outcome.case.loop} | {name} | {outcome.verdict} | {first} |")
    return "\n".join(rows)


PAGE = """\
<!-- Made by `python benchmarks/foreign_guards.py --page docs/measurements/foreign-guards.md`. -->

# Defects in other training loops, and what the guards in them say

The loops of `benchmarks/foreign_loops/` use the [library](../how-to/guards-library.md) on two ranks of this machine
(gloo). A defect is found if the first finding is of the right step and names the right tensor and ranks, and the
run ends. {found} of {defects} were found; {clean} of {undisturbed} undisturbed runs had no finding.

{table}
"""


def page(outcomes: Sequence[LoopOutcome]) -> str:
    """Return the page of the manual."""
    verdicts = [(bool(outcome.case.defect), outcome.verdict) for outcome in outcomes]
    return PAGE.format(
        found=verdicts.count((True, "found")),
        defects=sum(is_defect for is_defect, _ in verdicts),
        clean=verdicts.count((False, "clean")),
        undisturbed=sum(not is_defect for is_defect, _ in verdicts),
        table=table(outcomes),
    )


def main() -> None:
    """Run the cases that `--only` matches, and exit with 1 unless each is clean or found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a pattern for LOOP/DEFECT")
    parser.add_argument("--page", type=Path, help="write the page to this file")
    options = parser.parse_args()
    chosen = re.compile(options.only)
    outcomes = []
    for case in cases():
        if not chosen.search(f"{case.loop}/{case.defect}"):
            continue
        outcomes.append(run_case(case))
        print(table(outcomes[-1:]).splitlines()[-1], flush=True)
        if outcomes[-1].verdict == "BROKEN":
            print(outcomes[-1].output[-3000:], file=sys.stderr)
    print("\n" + table(outcomes))
    if options.page:
        options.page.write_text(page(outcomes))
    sys.exit(any(outcome.verdict not in ("clean", "found") for outcome in outcomes))


if __name__ == "__main__":
    main()
