"""Adaptive batches inside trainers that own their loop; each module is loaded only when used."""
