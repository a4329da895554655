"""The calls that a rank recorded: torch's flight recorder, and the ring."""
