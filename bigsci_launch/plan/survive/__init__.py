"""What survives the loss of nodes: templates, compositions, transfers; what `survive` costs, what a spare is worth."""
