"""How an outcome under `survive` is judged: no innocent rank may be fenced, and none at all where nothing hangs."""

from __future__ import annotations

import pytest

from bigsci_launch.hang_lab.recovery_outcome import Fenced, JudgedRecovery, RecoveryJudgement, RecoveryOutcome
from bigsci_launch.hang_lab.zoo import find_reproduction
from bigsci_launch.topology import Topology

TOPOLOGY = Topology(tp=2, pp=1, dp=2)
FINISHED, CRASHED, RUNNING = ("finished", 0), ("crashed", 1), (None, None)


@pytest.mark.parametrize(
    ("name", "fenced", "num_generations", "ended", "judgement"),
    [
        ("H01", (1,), 2, FINISHED, RecoveryJudgement.RECOVERED),
        ("H01", (1,), 2, CRASHED, RecoveryJudgement.NOT_FINISHED),
        ("H01", (0,), 2, FINISHED, RecoveryJudgement.WRONGLY_FENCED),
        ("H01", (1, 0), 3, FINISHED, RecoveryJudgement.WRONGLY_FENCED),
        ("H01", (), 1, RUNNING, RecoveryJudgement.TOO_EARLY),
        ("H10", (), 1, RUNNING, RecoveryJudgement.LEFT_ALONE),
        ("H10", (3,), 2, FINISHED, RecoveryJudgement.WRONGLY_FENCED),
        ("H70", (), 2, FINISHED, RecoveryJudgement.OVERCOME),
        ("H70", (), 3, CRASHED, RecoveryJudgement.NOT_FINISHED),
        ("H00", (), 1, RUNNING, RecoveryJudgement.LEFT_ALONE),
        ("H00", (1,), 2, FINISHED, RecoveryJudgement.WRONGLY_FENCED),
        ("H50", (1,), 2, FINISHED, RecoveryJudgement.WRONGLY_FENCED),
        ("H00-finished", (), 1, FINISHED, RecoveryJudgement.LEFT_ALONE),
        ("H00-finished", (), 1, CRASHED, RecoveryJudgement.NOT_FINISHED),
    ],
)
def test_every_outcome_has_one_judgement(
    name: str,
    fenced: tuple[int, ...],
    num_generations: int,
    ended: tuple[str | None, int | None],
    judgement: RecoveryJudgement,
) -> None:
    ranks = tuple(Fenced(rank, number, "it sleeps") for number, rank in enumerate(fenced))
    outcome = RecoveryOutcome(ranks, num_generations, (), *ended, 40.0)
    assert JudgedRecovery(find_reproduction(name), TOPOLOGY, 1, outcome).judgement is judgement


def test_a_culprit_that_a_look_accuses_must_be_fenced() -> None:
    outcome = RecoveryOutcome((), 1, (), *RUNNING, 300.0, accused=frozenset({1}))
    judged = JudgedRecovery(find_reproduction("H01"), TOPOLOGY, 1, outcome)
    assert (judged.judgement, judged.judgement.is_right) == (RecoveryJudgement.NOBODY_FENCED, False)
