"""What a run has saved: whether it is sound, whether the run may resume from it, and what a restart changed."""
