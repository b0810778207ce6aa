"""A run's output: console, run folder, JSON files."""
