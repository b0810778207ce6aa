"""Layout shard: gradients and optimizer state, and parameters if need be, in parts."""
