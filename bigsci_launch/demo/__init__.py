"""The demonstration: the whole tool on one machine, by its own commands, in a few minutes."""
