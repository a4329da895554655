"""What a setup is and whether it is legal. Pure."""
