"""Who takes part in a generation: seats, ranks and the layout. Pure."""
