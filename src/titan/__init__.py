"""Titan: Mixture-of-Experts models on several Macs."""

__version__ = "0.1.0"
