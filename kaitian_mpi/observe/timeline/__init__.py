"""Records what a rank does and when, for one timeline of all ranks."""
