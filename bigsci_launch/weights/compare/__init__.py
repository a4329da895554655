"""The comparison of two sets of weights, and its figures."""
