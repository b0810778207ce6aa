"""Records each rank's events for one timeline of all ranks."""
