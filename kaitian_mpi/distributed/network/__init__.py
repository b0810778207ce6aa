"""Reductions between hosts: each byte crosses a host's network link once in each direction."""
