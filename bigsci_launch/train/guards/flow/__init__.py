"""Follows a gradient from the loss through the layers and over the ranks to AdamW, one module for each leg."""
