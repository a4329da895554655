"""Checkpoints: saved, loaded, resharded; and the state that training begins with."""
