"""The lock of the training state, which is also taken to save the state on a signal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class StateLock:
    """Held while the state changes; taken by any other reader of it.

    Attributes:
        on_acquired: called with the lock held, before the state changes; may be None.
        on_release: called with the lock held, after the change, with the exception that ended it or
            None; may be None.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner, self._depth = 0, 0
        self.on_acquired: Callable[[], None] | None = None
        self.on_release: Callable[[BaseException | None], None] | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            # In this order: a signal handler that runs in between finds one or the other.
            self._owner = threading.get_ident()
            if self.on_acquired is not None:
                self.on_acquired()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._depth == 1:
            if self.on_release is not None:
                self.on_release(error)
            self._owner = 0
        self._depth -= 1
        self._lock.release()
