"""The tasks of kaitian-train, made from its flags."""
