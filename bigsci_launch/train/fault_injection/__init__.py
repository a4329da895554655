"""Faults and defects on purpose. Only `train/companions.py` lets them in, if the run file asks for them."""
