"""What gradients look like on slow links: fewer bits, and what was lost is sent the next time."""
