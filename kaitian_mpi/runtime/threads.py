"""Threads: how many torch computes with, and those that this package starts to communicate."""

from __future__ import annotations

import threading

_default: int | None = None


class CommunicationThread(threading.Thread):
    """A thread that executes collectives or messages; of the script, it runs only callbacks."""


def record_default_threads() -> None:
    """Record torch's current number of threads as the default, not chosen by the script."""
    import torch

    global _default
    _default = torch.get_num_threads()


def set_default_threads(threads: int) -> int:
    """Set torch's number of threads, unless the script has changed it from the default.

    Returns:
        The number of threads torch computes with.
    """
    import torch

    if _default is None or torch.get_num_threads() == _default:
        torch.set_num_threads(threads)
        record_default_threads()
    return torch.get_num_threads()
