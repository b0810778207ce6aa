"""Reads the folder of a run, and shows what happened in it as figures and an HTML page."""
