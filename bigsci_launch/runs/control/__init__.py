"""What people ask of ranks that run, as files that the ranks look for."""
