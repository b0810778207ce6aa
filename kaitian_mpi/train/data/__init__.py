"""Sampling and loading of each rank's samples of a step."""
