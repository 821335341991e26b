"""The worker's side of the lane: listening, tokens, and one connection's frames."""
