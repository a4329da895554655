"""The lines that ranks print, as their logs hold them."""
