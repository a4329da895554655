"""What a job consists of: its options, its containers, the script, and the program that the script starts."""
