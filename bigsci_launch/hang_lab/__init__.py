"""Hangs of every known kind, made on purpose with real processes, and the verdict of `bsl spy` on each."""
