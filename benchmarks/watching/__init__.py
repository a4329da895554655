"""What `bsl watch` is tried on: runs that are replayed from files with a simulated clock."""
