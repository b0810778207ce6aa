"""One step after another: the trainer, and what all ranks do after each step."""
