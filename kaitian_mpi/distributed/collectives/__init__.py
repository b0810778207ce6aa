"""Executes collectives: by a vendor's library, through host memory, or by both together."""
