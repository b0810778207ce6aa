"""The built-in data sets, and those that a user's factory makes."""
