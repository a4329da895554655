"""A comparison as text, JSON and page."""
