"""The tags of the package's own messages between two ranks, by the communicator they travel on.

A receive that matches any tag would take another part's message, so each part has its own. The tags
of a script's own `send` and `recv` are on a communicator of their own.
"""

COUNT = 32_768
"""How many tags every MPI allows, from 0 on."""

# A communicator of its own
SHUTDOWN = 0

# The store's communicator
STORE_REQUEST = 1
STORE_REPLIES = range(2, 2 + 16_384)

# A group's communicator, or the world's
PAIRWISE = 1
WAKE_UP = 2
MONITORED_BARRIERS = range(1_000, 31_000)
