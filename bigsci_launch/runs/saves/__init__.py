"""Saves of the trainer that the disk has refused."""
