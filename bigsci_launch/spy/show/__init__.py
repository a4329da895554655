"""The answer of `spy` as text, JSON and page."""
