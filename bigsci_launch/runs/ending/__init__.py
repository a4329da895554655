"""How an attempt ended whose batch script could not write exit.json. Reads only: what is worked out is never stored."""
