"""Signatures of known hangs: read from files, and found in a verdict."""
