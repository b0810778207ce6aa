"""What differs between releases of Python, where the ranks of a job have several.

This package sends nothing pickled, but torch does: with `broadcast_object_list` and the like, and
in distributed checkpoints.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterable

_MOVED_IN = (3, 13)
_MOVED_TO = "pathlib._local"


def accept_pickled_paths(pythons: Iterable[str]) -> None:
    """Let this process unpickle the paths of ranks with Python 3.13. Not collective.

    3.13 pickles a `Path` as a class of `pathlib._local`, a module that earlier releases do not
    have, and that 3.14 has for such pickles alone (python/cpython#133789).

    Args:
        pythons: the ranks' releases of Python, such as `3.13.0`.
    """
    prefix = "{}.{}.".format(*_MOVED_IN)
    if sys.version_info < _MOVED_IN and any(python.startswith(prefix) for python in pythons):
        sys.modules.setdefault(_MOVED_TO, pathlib)
