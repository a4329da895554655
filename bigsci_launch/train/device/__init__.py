"""The device of a rank: which one it takes, and whether all ranks took devices that can train together."""
