"""What a job consists of: its options, its containers, and the script."""
