"""What the controller does next, given what has happened. Pure."""
