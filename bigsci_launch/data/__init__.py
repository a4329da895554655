"""Corpora: reads and writes Megatron's indexed datasets, and makes them from text. Needs numpy, but not torch."""
