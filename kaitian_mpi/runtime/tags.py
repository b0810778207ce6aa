"""The tags of the package's point-to-point messages, grouped by communicator; their version."""

PROTOCOL = 5
"""The version of the messages between ranks. It increases when their order or form changes, so that
ranks with different builds of the package end with one line."""

COUNT = 32_768
"""The number of tags that every MPI supports, from 0 on."""

# A dedicated communicator
SHUTDOWN = 0

# The store's communicator
STORE_REQUEST = 1
STORE_REPLIES = range(2, 2 + 16_384)

# A group's or the world's communicator
PAIRWISE = 1
WAKE_UP = 2
CLOCK = 3
ALIVE = 5
AWAITED = 6
STATE = 7
AGREEMENT = 8
NETWORK = range(10, 1_000)

# MPI's own world, used by kaitian-doctor only
DOCTOR = 1
