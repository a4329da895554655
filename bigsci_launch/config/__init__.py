"""Run files and site files: their schema, how they are read, and the rules across sections."""
