"""Experiment trackers: what each of them does with a step and a note."""
