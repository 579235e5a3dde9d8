"""What is submitted to a Ray cluster: entry points and benchmarks."""
