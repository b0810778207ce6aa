"""What one rank does in training: state, computation, batch norm, evaluation, step times."""
