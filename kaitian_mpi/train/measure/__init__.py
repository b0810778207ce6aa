"""Benchmarks: times the user's model on each rank, and plans the batch sizes from the results."""
