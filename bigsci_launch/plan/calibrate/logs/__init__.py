"""Logs of other programs as measured rows, one module for each format."""
