"""Samples: their order, and the micro batches that a rank cuts from them."""
