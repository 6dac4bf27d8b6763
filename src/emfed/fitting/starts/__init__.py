"""Where a fit begins: starts that reveal no record, and several that compete in one federation."""

from emfed.fitting.starts.contest import METHODS, Found, search

__all__ = ["METHODS", "Found", "search"]
