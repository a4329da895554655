"""Which nodes to leave out: the memory of bad nodes, the check that finds them, the search for a slow one."""
