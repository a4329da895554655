"""`training.micro_batch_size: auto`: finds the size, and lets all ranks agree when one of them runs out of memory."""
