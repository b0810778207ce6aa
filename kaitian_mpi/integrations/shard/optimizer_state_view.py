"""What an optimizer of sharded parameters shows as its `state`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.local_optimizer_state import LocalOptimizerState


class OptimizerStateView(MutableMapping[Any, Any]):
    """What an optimizer shows as its `state` outside of `step`: that of this rank's rows.

    Iterating yields these rows, whose state may be changed. Looking up a whole parameter raises a
    UserError, as its state is spread over ranks. Not a dict: its own methods would reach nothing.
    """

    def __init__(self, owned: LocalOptimizerState) -> None:
        """Show the state of an optimizer's rows on this rank."""
        self._owned = owned

    def __getitem__(self, key: Any) -> Any:
        return self._owned.current[self._checked(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._owned.current[self._checked(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._owned.current[self._checked(key)]

    def __contains__(self, key: Any) -> bool:
        return self._checked(key) in self._owned.current

    def __iter__(self) -> Iterator[Any]:
        return iter(self._owned.current)

    def __len__(self) -> int:
        return len(self._owned.current)

    def __repr__(self) -> str:
        return repr(dict(self))

    # These must not add a missing state, as a look-up in a defaultdict does.

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter that is in no DDP."""
        return self._owned.current.get(self._checked(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Forget the state of a parameter that is in no DDP."""
        return self._owned.current.pop(self._checked(key), *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter that is in no DDP, or let it have this one."""
        return self._owned.current.setdefault(self._checked(key), default)

    def clear(self) -> None:
        """Forget all state, as the script does on each rank."""
        self._owned.replace(defaultdict(dict))

    def _checked(self, key: Any) -> Any:
        if self._owned.find_model(key) is not None:
            raise UserError(
                "--layout shard: the state of a parameter is with the ranks that own its rows and "
                "cannot be read from optimizer.state; use optimizer.state_dict()"
            )
        return key
