"""Examines each rank before a job, and judges the facts."""
