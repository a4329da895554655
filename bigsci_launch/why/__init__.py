"""Why a job ended, from whatever there is of it: its output, logs of ranks, error files of a launcher, Slurm."""
