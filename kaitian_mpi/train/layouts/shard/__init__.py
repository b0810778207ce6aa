"""Layout shard: each rank has a part of the gradients and optimizer state, or of all."""
