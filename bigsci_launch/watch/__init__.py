"""Notices what goes wrong with a run that nobody looks at, explains it, keeps the evidence, and acts when allowed."""
