"""Pickles read as descriptions: nothing in them is run."""
