"""What `survive` costs, and what a spare node is worth."""
