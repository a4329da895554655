"""One rank's process: who it is, how it starts, reports and ends, and what it decides with all others."""
