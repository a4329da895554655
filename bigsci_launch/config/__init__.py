"""The run file and the site file: their schema, how they are read, and the rules across sections."""
