"""`flexray profile`: a cost model measured on the very cluster that a config describes."""
