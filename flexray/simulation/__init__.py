"""`flexray simulate`: the same batches under every strategy, on paper."""
