"""What a step is: its schedule, its words, its log; and the moments at which companions are called."""
