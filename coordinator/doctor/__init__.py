"""`titan doctor`: what is wrong with this cluster, and what to do about it."""
