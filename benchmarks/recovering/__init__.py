"""Runs with `survive` that are injured on purpose, and the judgement of what became of them."""
