"""Checks that the trainer runs on itself in every run, so that no defect of parallel training goes unnoticed."""
