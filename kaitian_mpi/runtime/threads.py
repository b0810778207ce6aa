"""How many threads this rank computes with."""

from __future__ import annotations

_own: int | None = None


def note_threads() -> None:
    """Take torch's number of threads, as it is now, for one that the script has not chosen."""
    import torch

    global _own
    _own = torch.get_num_threads()


def use_threads(threads: int) -> int:
    """Compute with so many threads, unless the script has set another number than torch's own.

    Returns:
        How many threads torch computes with.
    """
    import torch

    if _own is None or torch.get_num_threads() == _own:
        torch.set_num_threads(threads)
        note_threads()
    return torch.get_num_threads()
