"""What is known of each rank before a job, and the verdicts on it."""
