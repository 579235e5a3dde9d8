"""The commands of `flexray`, a module each. Their heavy imports are inside the functions."""
