"""Sampling and loading: which samples each rank takes at each step."""
