"""Rounds in which nodes give back what they got."""
