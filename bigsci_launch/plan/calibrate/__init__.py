"""Constants of a cluster, learned from measured runs; their errors on rows left out, and drift over time."""
