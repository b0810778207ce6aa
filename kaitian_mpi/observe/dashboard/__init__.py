"""The live page of a run: a process that serves its figures on this host while it trains."""
