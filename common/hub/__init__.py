"""Checkpoints from a Hugging Face hub: what a name means, what a repository holds, and getting it."""
