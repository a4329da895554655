"""Failures that are injected into runs on a real Slurm, and the judgement of what `bsl` says about each."""
