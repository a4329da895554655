"""Whether the loss jumped where an attempt continued its run, and what changed there."""
