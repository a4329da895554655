"""Where ranks run: Slurm's own commands, or processes of this machine."""
