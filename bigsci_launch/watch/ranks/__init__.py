"""Looks at ranks that show nothing new, and what silence and looks mean together."""
