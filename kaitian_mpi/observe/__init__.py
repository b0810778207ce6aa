"""Records the measurements of a run, and passes them to sinks."""
