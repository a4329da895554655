"""A real Slurm on one machine, for trying and testing: started, asked and removed without a trace."""
