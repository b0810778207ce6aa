"""A training run: the session, the step loop, metrics, health checks, the summary."""
