"""The verdict on evidence, by a table of rules. Pure."""
