"""The size of micro-batches that a run with `training.micro_batch_size: auto` has found."""
