"""Forty further attacks: what hurts a run from outside, from inside a rank, and at the worst moment."""
