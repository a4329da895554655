"""What stands against a run that its ranks do not print: its job, nodes, disk, generations, other watchers."""
