"""How long each phase of a run takes, and what is not usual. Pure: it reads no clock and no file."""
