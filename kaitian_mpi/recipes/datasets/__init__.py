"""The built-in datasets, and those from a user's factory."""
