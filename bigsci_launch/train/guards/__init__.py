"""Checks that find defects of parallel training, once for all loops: `train/attach.py` and `engine` are their users."""
