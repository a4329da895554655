"""Which layout to take: the search, the checks of a run file, and the conversion of checkpoints that follows."""
