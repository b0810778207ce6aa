"""One rank's work, whatever is trained: state, computation, statistics, evaluation, clock."""
