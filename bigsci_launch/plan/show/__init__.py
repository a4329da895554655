"""Plans, checks and calibrations as text, JSON and pages."""
