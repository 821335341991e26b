"""The families that Titan opens, a file each; tests hold every one against mlx-lm's own class."""
