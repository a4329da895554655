"""Foreign programs beyond the torch family: MPI, JAX, Ray, Megatron-core, Slurm steps, and launchers of one's own."""

from __future__ import annotations

from foreign.case import ForeignCase
from foreign.cases_arrays import CASES as ARRAYS
from foreign.cases_clusters import CASES as CLUSTERS

CASES: tuple[ForeignCase, ...] = (*ARRAYS, *CLUSTERS)
