"""The keys of run files and site files: every key, its unit and its meaning."""
