"""Watches runs unattended: notices what goes wrong, explains it, keeps the evidence, and acts when allowed."""
