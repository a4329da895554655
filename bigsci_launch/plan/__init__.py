"""Which topologies are legal, what they hold and what they cost."""
