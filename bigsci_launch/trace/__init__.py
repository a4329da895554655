"""The last calls of ranks, from their rings."""
