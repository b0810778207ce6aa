"""A training run: the public `Training`, its loop, members, state and plan."""
