"""Sums a model's gradients over the ranks, each rank's with a weight of its own."""
