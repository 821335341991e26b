"""Where experts live: the plan, what it costs, how it is found. Pure functions over values; no sockets, no MLX."""

from titan.placement.plan import Node, Plan, Prediction
from titan.placement.problem import Problem
from titan.placement.solver import solve

__all__ = ["Node", "Plan", "Prediction", "Problem", "solve"]
