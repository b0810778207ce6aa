"""Load balancing: cost models, batch sizes and forecasts. Pure functions, without torch or MPI."""
