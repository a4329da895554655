"""Which files make up a set of weights."""
