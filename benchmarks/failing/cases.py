"""Sixty failures, twelve under each launcher. Ranks, nodes and the way in which ranks print differ."""

from __future__ import annotations

from failing.cases_accelerate import ACCELERATE
from failing.cases_deepspeed import DEEPSPEED
from failing.cases_ray import RAY
from failing.cases_srun import SRUN
from failing.cases_torchrun import TORCHRUN

FAILURES = (*SRUN, *TORCHRUN, *ACCELERATE, *DEEPSPEED, *RAY)
