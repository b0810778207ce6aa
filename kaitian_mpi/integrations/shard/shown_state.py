"""What an optimizer of sharded parameters shows as its `state`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.owned_state import OwnedState


class ShownState(defaultdict[Any, Any]):
    """What an optimizer shows as its `state` outside of `step`: that of this rank's rows.

    A loop over all of it may change each element. The state of a parameter is with several ranks.
    """

    def __init__(self, owned: OwnedState) -> None:
        """Show the state of an optimizer's rows on this rank."""
        super().__init__(dict)
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

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter that is in no DDP."""
        return self._owned.current.get(self._checked(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Forget the state of a parameter that is in no DDP."""
        return self._owned.current.pop(self._checked(key), *default)

    def keys(self) -> Any:
        """Return this rank's rows."""
        return self._owned.current.keys()

    def values(self) -> Any:
        """Return the states of this rank's rows."""
        return self._owned.current.values()

    def items(self) -> Any:
        """Return this rank's rows and their states."""
        return self._owned.current.items()

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
