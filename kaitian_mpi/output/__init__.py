"""What a run shows and writes: console, run folder."""
