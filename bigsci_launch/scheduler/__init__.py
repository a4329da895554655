"""Where ranks run: under Slurm, through its own commands, or as processes on this machine."""
