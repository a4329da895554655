"""From a run file to a submitted job: preparation, request, script, submission."""
