"""Defects that are injected into `bsl train` from outside the package, and the judge of what it says of each."""
