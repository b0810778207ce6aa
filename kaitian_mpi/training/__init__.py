"""A training run: the session, the step loop, metrics, health checks and the summary."""
