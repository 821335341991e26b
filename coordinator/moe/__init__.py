"""The MoE hook: mlx-lm routes and combines, Titan executes the experts wherever they are."""
