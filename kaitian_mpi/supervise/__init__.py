"""Restarts a job after a failure, without the hosts that are lost."""
