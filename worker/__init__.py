"""titan-worker: holds experts in memory and executes them for a coordinator."""
