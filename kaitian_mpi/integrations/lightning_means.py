"""The means over an epoch that Lightning logs with `sync_dist=True`: over the rows of all ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

_RESULT = "trainer.connectors.logger_connector.result"


def count_rows_exactly(counts: Callable[[], bool]) -> None:
    """Make the epochs' means those over rows, whatever number of them a rank has.

    Lightning divides the mean of the ranks' sums by the mean of their rows, which it keeps as a
    whole number and so rounds down (lightning/fabric/utilities/distributed.py, `_sync_ddp`).

    Args:
        counts: returns whether the rows of the batch that is trained on count, and are not given
            only for a rank to have a batch.
    """
    for package in ("lightning.pytorch", "pytorch_lightning"):
        metric = getattr(sys.modules.get(f"{package}.{_RESULT}"), "_ResultMetric", None)
        if metric is not None and not hasattr(metric.__init__, "counts_exactly"):
            _extend(metric, counts)


def _extend(metric: Any, counts: Callable[[], bool]) -> None:
    create = metric.__init__
    update = metric.update

    @functools.wraps(create)
    def create_exact(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        if self.is_tensor and self.meta.is_mean_reduction:
            self.cumulated_batch_size = self.cumulated_batch_size.to(self.value.dtype)
            self._defaults["cumulated_batch_size"] = self.cumulated_batch_size.clone()

    @functools.wraps(update)
    def update_counted(self: Any, value: Any, batch_size: int) -> None:
        is_stand_in = "train" in self.meta.fx and not counts()
        update(self, value, 0 if is_stand_in else batch_size)

    vars(create_exact)["counts_exactly"] = True
    metric.__init__ = create_exact
    metric.update = update_counted
