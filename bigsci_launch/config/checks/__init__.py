"""Rules of a run file that concern one subject; `config.check` runs all of them."""
