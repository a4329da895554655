"""Why an attempt ended, from what its ranks left. Reads only: the program of the job script stores the answer."""
