"""What every rank of a job is doing: collect stacks, merge them, find the odd ranks."""
