"""From a run file to a submitted job: request, script, submission."""
