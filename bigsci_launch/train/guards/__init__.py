"""Checks of the trainer on itself, in every run: no defect of parallel training goes on unseen."""
