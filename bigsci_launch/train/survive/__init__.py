"""The rank's side of `survive`: leaving a generation, keeping its state in memory, and restoring it in the next."""
