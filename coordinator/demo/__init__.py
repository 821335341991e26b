"""`titan demo`: a whole cluster on one machine, as processes, and what a user can learn from it."""
