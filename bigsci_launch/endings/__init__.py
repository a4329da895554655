"""What programs print about the end of a job: a table of words, who says them, and what follows from all of them."""
