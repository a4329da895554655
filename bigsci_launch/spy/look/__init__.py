"""Touches machines, as the only part of `spy`: finds the job, and collects from its nodes."""
