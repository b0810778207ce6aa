"""What a terminal or a log file shows while a run trains."""
