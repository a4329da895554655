"""Programs of other people's kind that are slowed down on one rank, and where that is."""
