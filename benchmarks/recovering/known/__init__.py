"""The 40 attacks of the first adversary, by what they hurt."""
