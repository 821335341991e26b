"""Versions that two nodes compare before they work together."""

from importlib.metadata import version

from titan import __version__

SOFTWARE_VERSION = __version__
MLX_VERSION = version("mlx")
