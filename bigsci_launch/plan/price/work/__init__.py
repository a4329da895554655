"""What a step computes, moves and sends, counted before any rate weighs it. Pure."""
