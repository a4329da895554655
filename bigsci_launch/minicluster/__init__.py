"""A real Slurm on one machine, for trials and tests: starts, queries and removes it without a trace."""
