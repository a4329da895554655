"""What a run is doing, as a value, as text and as JSON."""
