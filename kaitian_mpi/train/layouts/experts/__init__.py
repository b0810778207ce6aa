"""Layout experts: each expert of a mixture on one rank, all else on every rank."""
