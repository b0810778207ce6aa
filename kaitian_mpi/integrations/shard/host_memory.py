"""Host memory for what one rank collects from all owners."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from kaitian_mpi.devices.cpu import available_bytes
from kaitian_mpi.devices.memory_limit import is_limited
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.tensor_files import Spool
from kaitian_mpi.train.layouts.shard.memory_budget import USUAL_STATES

_MAX_FRACTION = 0.25  # of the host's free memory


class HostMemory:
    """Keeps the tensors of a model or an optimizer's state that are brought from their owners.

    In memory if there is plenty, else in unnamed files of `TMPDIR`, which are mapped.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Keep nothing yet. `parameters` are those of the model, which is brought, or its state."""
        size = sum(parameter.nbytes for parameter in parameters) * (1 + USUAL_STATES)
        is_plenty = size <= _MAX_FRACTION * available_bytes() and not is_limited()
        self._spool = Spool(None if is_plenty else Path(tempfile.gettempdir()))

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor of another one's shape, strides and dtype.

        Raises:
            UserError: the disk has no space for the files.
        """
        return self._checked(self._spool.empty(like))

    def keep(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return tensors concatenated by rows.

        Raises:
            UserError: the disk has no space for the files.
        """
        return self._checked(self._spool.keep(rows))

    def _checked(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._spool.fault is not None:
            raise UserError(
                f"--layout shard: the state to be saved cannot be kept in {tempfile.gettempdir()} "
                f"({self._spool.fault.strerror}); set TMPDIR to a folder with more space"
            )
        return tensor
