"""An optimizer's state, which is read from its owners when it is looked at."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any


class LazyOptimizerState(dict[int, Any]):
    """The state of each parameter, by its place in an optimizer's groups.

    All ranks may call `state_dict`, and only one that looks at it, or writes it, needs the memory.
    In a file it is a plain dict.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Have what a dict of these arguments has, as if a script makes another one by its type."""
        super().__init__(*args, **kwargs)
        self._collect: Callable[[], Mapping[int, Any]] = dict
        self._lock = threading.RLock()

    @classmethod
    def collected_by(cls, collect: Callable[[], Mapping[int, Any]]) -> LazyOptimizerState:
        """Return a state that `collect` will read. Not collective."""
        state = cls()
        state._collect = collect
        return state

    def read(self) -> None:
        """Read the whole state, if it is not here yet; once that fails, it can be read again."""
        if self._collect is not dict:
            with self._lock:  # another thread may be reading it
                super().update(self._collect())
                self._collect = dict  # it refers to the optimizer's rows

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Of the classes of dicts, torch.load(weights_only=True) permits this one.
        return OrderedDict, (), None, None, iter(self.items())


_METHODS = (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__reversed__"),
    *("__len__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__repr__"),
    *("get", "keys", "values", "items", "copy"),
    *("pop", "popitem", "setdefault", "update", "clear"),
)


def _after_reading(method: Callable[..., Any]) -> Any:
    """Return a method of dict that first reads what is still with the owners."""

    @functools.wraps(method)
    def read_and_call(state: LazyOptimizerState, *args: Any, **kwargs: Any) -> Any:
        state.read()
        return method(state, *args, **kwargs)

    return read_and_call


for _name in _METHODS:
    setattr(LazyOptimizerState, _name, _after_reading(getattr(dict, _name)))
