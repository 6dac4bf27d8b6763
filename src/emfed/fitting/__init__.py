"""From data and settings to a fitted model."""
