"""`survive`: a job that continues when a rank, a node or a device is lost: generations, and their controller."""
