"""Corpora: Megatron's indexed datasets, read and written, and made from a folder of text. Needs numpy, never torch."""
