"""Which layouts can run: one table of rules for run files and for the setups that `bsl plan` searches."""
