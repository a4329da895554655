"""What is done to a run: what people ask for in its `control/`, and what a watcher may do by itself."""
