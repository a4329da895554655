"""Read checkpoints and weight dumps without torch, and compare them bit by bit."""
