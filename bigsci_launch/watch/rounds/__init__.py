"""One watcher, round after round: what it reads and judges, does, keeps open, and reports."""
