"""One watcher, round after round: what it reads and judges, does, keeps in its books, and says."""
