"""Checkpoints: when and how they are written, and how a run resumes from one."""
