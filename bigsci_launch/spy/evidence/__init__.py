"""What was read of a job, as values: ranks, stacks, groups, kernel facts, known code. Unknown is a value."""
