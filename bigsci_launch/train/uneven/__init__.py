"""`parallelism.engine: uneven`: pipelines of different depths side by side, on torch's schedules."""
