"""An attack on a run, and what must become of the run. Said before the run, so that the outcome cannot bend it.

How to add a case
-----------------
Write a function that gets a started run (`StartedRun`, in `attacked_run.py`) and injures it, and put an `Attack` with
it into the tuple `ATTACKS` of `attacks_known.py` or `attacks_other.py`:

    def _kill_a_rank(run: StartedRun) -> None:
        run.until(16)                        # wait until step 16 is finished (SystemError if it never is)
        run.kill(run.rank_pid(2))            # SIGKILL; run.kill(pid, signal.SIGSTOP) for another signal

    ATTACKS = (Attack("kill-rank-2", "kills", "SIGKILL to rank 2", _kill_a_rank, Expected(equal=True)),)

The run is `bsl submit --local` of a tiny GPT, 4 gloo ranks (pp2 x dp2; `layout` for another), fp32, 30 steps of about
0.25 s, saves every 10, `survive: true`. `settings` are further sections of the run file, or keys of those that are
there. When the function returns, the run is awaited, and compared with the undisturbed run of the same settings (made
once and kept; the keys in `NOT_IN_REFERENCE` are left out of it; `reference` replaces more of them).

- `Expected(equal=True)`: exit 0, `finished`, every loss and every weight bit for bit. `tolerance=1e-6` if replicas are
  lost on purpose. `Expected(reason="guard", rank=2)`: it ends with that reason and that first failure.
  `recovered=("buddies",)`: the kinds of recovery, in order, where they matter; None: any.
- `run.claim("no process is left", not run.processes())`: anything else that must hold. `run.note("after 3.1 s")`: what
  the table says besides.
- `run.failures()`: what ended each generation, as `("died", 2)`; `run.status()`, `run.generations()`,
  `run.processes()`.
- `run.wait()` awaits an end in the middle; `run.start()` submits the same run again (the losses of all attempts count
  together); `run.bsl("status", run.run.path)` runs any command in the folder of the run file.
- `run.inject(rank, code)` runs Python in the process of that rank, in a thread of its own, and waits until it has
  begun.
- `starts=False`: the function starts the run itself, with what it prepared (`run.start(environment=...)`).
- `raise CannotRun("needs Slurm")`: the row says so.

Run it: `python benchmarks/recovery_attacks.py NAME --cases other --folder DIR`. Settings and expectations are in the
case: no attack has a tolerance, a wait or an expectation that was fitted to what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recovering.cases import Layout

if TYPE_CHECKING:
    from recovering.attacked_run import StartedRun

ATTACK_STEPS, ATTACK_SAVES = 30, 10
USUAL = Layout(tp=1, pp=2, dp=2, precision="fp32", dropout=0.0)
SLOW = {"kind": "slow", "rank": 0, "step": 1, "seconds": 0.25}
"""Without it, a step takes 20 ms, and nothing can be done in the middle of one."""
SETTINGS: dict[str, Any] = {
    "training": {"steps": ATTACK_STEPS},
    "checkpoint": {"save_interval": ATTACK_SAVES},
    "monitor": {"eval_interval": 100},
    "faults": [SLOW],
}
NOT_IN_REFERENCE = ("faults", "survive", "slurm", "env")


class CannotRun(Exception):
    """This attack cannot be made on this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What must become of an attacked run: the numbers of the undisturbed one, or an end with a reason and a rank."""

    equal: bool = False
    tolerance: float = 0.0
    reason: str | None = None
    rank: int | None = None
    recovered: tuple[str, ...] | None = None

    def __str__(self) -> str:
        wanted = "equal" if not self.tolerance else f"equal to {self.tolerance:g}"
        ends = f"ends: {self.reason}" + ("" if self.rank is None else f", rank {self.rank}")
        sources = f", from {', '.join(self.recovered)}" if self.recovered else ""
        sources = ", without a recovery" if self.recovered == () else sources
        return (wanted if self.equal else ends) + sources


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack. `what` is for the table; `injure` gets the started run."""

    name: str
    group: str
    what: str
    injure: Callable[[StartedRun], None]
    expected: Expected
    layout: Layout = USUAL
    settings: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] = field(default_factory=dict)
    survive: bool = True
    starts: bool = True
    limit_s: float = 240.0

    def run_file(self) -> dict[str, Any]:
        """Return the sections that differ from those of `write_run_file`."""
        return merged(SETTINGS, self.settings)

    def reference_file(self) -> dict[str, Any]:
        """Return the same for the undisturbed run."""
        sound = {key: value for key, value in self.run_file().items() if key not in NOT_IN_REFERENCE}
        return merged(sound, self.reference)


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of both; where both have a key, that of the second."""
    both = {**first}
    for name, value in second.items():
        both[name] = merged(both[name], value) if isinstance(value, Mapping) and name in both else value
    return both
