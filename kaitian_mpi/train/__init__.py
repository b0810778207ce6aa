"""A training run: the public `Training`, the session, its attempts, results and the summary."""
