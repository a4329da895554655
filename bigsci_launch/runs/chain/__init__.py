"""How a run starts itself again: what was agreed, what the job script decided, and which attempt waits."""
