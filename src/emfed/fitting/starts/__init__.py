"""Where a fit begins: starts that reveal no record."""
