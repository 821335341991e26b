"""Finding a placement. `solve` is the entry."""

from titan.placement.solver.solve import METHODS, solve

__all__ = ["METHODS", "solve"]
