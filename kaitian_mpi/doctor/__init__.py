"""What `kaitian-doctor` does: it examines every rank, probes what is between them, and reports."""
