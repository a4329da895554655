"""Why weights differ: causes, patterns, audit, and the seam at a restart."""
