"""How a gang attends to its pack: exchange of shards (ulysses) and kernels (backends)."""
