"""Reads checkpoints and weight dumps without torch, and compares them bit by bit."""
