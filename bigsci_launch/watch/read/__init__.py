"""Logs and records of a run as they grow: each new line is read once, as log events."""
