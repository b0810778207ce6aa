"""What is measured while a run trains, and the sinks that it goes to."""
