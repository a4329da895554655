"""The only door to textual: screens that a person lives in."""
