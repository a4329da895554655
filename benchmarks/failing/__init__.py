"""Failures of jobs under the launchers that people use, and the judge of what `bsl why` says of each."""
