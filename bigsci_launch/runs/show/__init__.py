"""What the state of runs looks like: lines, tables and JSON."""
