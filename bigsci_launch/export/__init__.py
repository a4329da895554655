"""What a run records, in the forms that other tools read: metrics, and runs of experiment trackers."""
