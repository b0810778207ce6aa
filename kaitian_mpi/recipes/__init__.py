"""Trainings that kaitian-train knows by name: what to train, made from its flags."""
