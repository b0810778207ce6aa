"""An optimizer's state, which is read from its owners when it is looked at."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any


class OwnersState(dict[int, Any]):
    """The state of each parameter, by its place in an optimizer's groups.

    All ranks may call `state_dict`, and only one that looks at it, or writes it, needs the memory.
    In a file it is a plain dict.
    """

    def __init__(self, collect: Callable[[], dict[int, Any]]) -> None:
        """Read nothing yet; `collect` reads the whole state. Not collective."""
        super().__init__()
        self._collect: Any = collect

    def __getitem__(self, place: int) -> Any:
        self._fill()
        return super().__getitem__(place)

    def __contains__(self, place: object) -> bool:
        self._fill()
        return super().__contains__(place)

    def __iter__(self) -> Iterator[int]:
        self._fill()
        return super().__iter__()

    def __len__(self) -> int:
        self._fill()
        return super().__len__()

    def __eq__(self, other: object) -> bool:
        self._fill()
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        self._fill()
        return super().__repr__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._fill()
        # Of the classes of dicts, torch.load(weights_only=True) permits this one.
        return OrderedDict, (), None, None, iter([*super().items()])

    def get(self, place: int, default: Any = None) -> Any:
        """Return the state of a parameter."""
        self._fill()
        return super().get(place, default)

    def keys(self) -> KeysView[int]:  # type: ignore[override]
        """Return the places."""
        self._fill()
        return KeysView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Return the states."""
        self._fill()
        return ValuesView(self)

    def items(self) -> ItemsView[int, Any]:  # type: ignore[override]
        """Return the places and states."""
        self._fill()
        return ItemsView(self)

    def copy(self) -> dict[int, Any]:
        """Return a plain dict."""
        self._fill()
        return {**self}

    def _fill(self) -> None:
        collect = self._collect
        if collect is not None:
            self._collect = None
            self.update(collect())
