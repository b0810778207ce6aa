"""Which ranks train, which stand by, and how they regroup after a loss."""
