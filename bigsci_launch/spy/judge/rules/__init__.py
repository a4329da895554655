"""The rules of the verdict, one module for each kind."""
