"""What a run must not lose: saving it, finding it again, and resuming from it."""
