"""Where a fit begins: starts that reveal no record, and several that compete in one federation."""

from emfed.fitting.starts.start_search import NOT_INSIDE, search

__all__ = ["NOT_INSIDE", "search"]
