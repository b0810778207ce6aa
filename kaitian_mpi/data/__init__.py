"""Which samples each rank takes at each step, and how they are loaded."""
