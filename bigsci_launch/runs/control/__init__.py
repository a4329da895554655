"""What is asked of a run and of the processes of its attempts, a file for each request."""
