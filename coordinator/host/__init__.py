"""The host model: mlx-lm's module tree without its experts, and the local experts that stand in their place."""
