"""Hangs under `survive`: what is fenced, and whether the job finishes."""
