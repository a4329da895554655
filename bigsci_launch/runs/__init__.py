"""What a run leaves on disk: its directory, its events, its status and its logs."""
