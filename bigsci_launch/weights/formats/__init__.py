"""Readers of checkpoint formats, and the table that chooses one by suffix and first bytes."""
