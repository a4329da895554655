"""What every rank of a job is doing: collect stacks, merge them, say who is odd."""
