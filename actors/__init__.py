"""What runs on a GPU: attention, gangs, parameter sharding, the engine; and the Ray actors around them."""
