"""Readers of what others hand over, sound inputs for each, and ways to damage them."""
