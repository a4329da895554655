"""Hangs of every known kind, made on purpose with real processes, and what `bsl spy` says of each."""
