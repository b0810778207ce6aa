"""Layout pipeline: each rank computes consecutive layers of the model."""
