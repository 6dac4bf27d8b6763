"""A Flower app around emfed; change what you like."""
