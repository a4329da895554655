"""Tells people what was found: a command, a webhook."""
