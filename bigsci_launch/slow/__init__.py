"""Who makes a job slow: which rank, in which phase of a step, and what the others lose by it."""
