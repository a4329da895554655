"""The run as one page, and as a screen that follows it."""
