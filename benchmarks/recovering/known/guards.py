"""Weights of one rank that change while it trains: what the guards find, and whom they accuse."""

from __future__ import annotations

from functools import partial

from recovering.attack import SLOW, Attack, Expected
from recovering.attacked_run import StartedRun
from recovering.cases import Layout

FOUR = Layout(tp=1, pp=1, dp=4, precision="fp32", dropout=0.0)
FOUR_BF16 = Layout(tp=1, pp=1, dp=4, precision="bf16", dropout=0.0)
WEIGHTS = """
import gc, time, torch
weight = next(each for each in gc.get_objects() if isinstance(each, torch.nn.Parameter) and each.shape == (192, 64))
"""
AGAIN_AND_AGAIN = f"""{WEIGHTS}
until = time.time() + 4
while time.time() < until:
    with torch.no_grad():
        weight.data[3, 5] += 0.01
    time.sleep(0.004)
"""
ZERO = f"{WEIGHTS}\nwith torch.no_grad():\n    weight.data.zero_()\n"
ONCE = f"{WEIGHTS}\nwith torch.no_grad():\n    weight.data[3, 5] = weight.data[3, 5] * 1.5 + 0.01\n"


def _changed(rank: int, code: str, run: StartedRun) -> None:
    run.until(7)
    run.inject(rank, code)
    if code == ONCE:
        return
    run.wait()
    error = (run.status().get("exit") or {}).get("first_failure") or {}
    run.claim(f"it is a GuardError: {str(error.get('error') or error)[:120]}", "GuardError" in str(error))
    told = run.bsl("status", run.run.path).stdout
    run.claim("what to do next names that rank", f"--rank {rank}" in told)


def _guarded(interval: int | str) -> dict[str, object]:
    return {"guards": {"interval": interval}, "faults": [{**SLOW, "rank": 3}]}


def _attack(name: str, what: str, rank: int, code: str, interval: int | str = 1, layout: Layout = FOUR) -> Attack:
    expected = Expected(reason="crashed", rank=rank)
    return Attack(
        name, "guards", what, partial(_changed, rank, code), expected, layout=layout, settings=_guarded(interval)
    )


ATTACKS = (
    _attack("guard-0", "37. dp 4, a weight of rank 0 changes, fp32", 0, AGAIN_AND_AGAIN),
    _attack("guard-0-bf16", "37. the same, bf16", 0, AGAIN_AND_AGAIN, layout=FOUR_BF16),
    _attack("guard-0-auto", "37. the same, fp32, `interval: auto`", 0, AGAIN_AND_AGAIN, "auto"),
    _attack("guard-2", "38. dp 4, a weight of rank 2 changes", 2, AGAIN_AND_AGAIN),
    _attack("guard-zero", "39. dp 4, a weight of rank 0 becomes zero", 0, ZERO),
    Attack(
        "guard-once",
        "guards",
        "40. dp 4, one element of rank 0 changes once, in a step",
        partial(_changed, 0, ONCE),
        Expected(equal=True, tolerance=1e-4),
        layout=FOUR,
        settings=_guarded(1),
    ),
)
