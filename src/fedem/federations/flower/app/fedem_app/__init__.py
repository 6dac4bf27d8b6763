"""A Flower app around fedem; change what you like."""
