"""Records to figures. Sees only records and plain tables."""

from fedem.reporting.figures import draw_trajectories

__all__ = ["draw_trajectories"]
