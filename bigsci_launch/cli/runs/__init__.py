"""The verbs that start runs and look after them."""
