"""The command line: one thin file per verb. The only package that knows click and rich."""
