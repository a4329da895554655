"""Readers of evidence from other tools (`py-spy dump`, torch's flight recorder, NCCL's RAS), which make a bundle."""
