"""Training: benchmark, plan, the loop, evaluation, what a run leaves behind."""
