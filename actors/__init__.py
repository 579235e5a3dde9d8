"""What runs on a GPU: attention, gangs, parameter sharding, the engine, and its Ray actor."""
