"""Chooses how the progress of a run is shown: `--progress` and `--quiet`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.observe.live import LiveView
from kaitian_mpi.observe.plain import PlainProgress
from kaitian_mpi.observe.screen import Screen
from kaitian_mpi.observe.sink import MetricsSink
from kaitian_mpi.observe.user_terminal import (
    MIN_COLUMNS,
    MIN_ROWS,
    NoTerminalError,
    can_draw_unicode,
    find_terminal,
)
from kaitian_mpi.observe.view import Place, ViewState

_log = logging.getLogger(__name__)


def open_progress(config: TrainingConfig, infos: Sequence[RankInfo], title: str) -> MetricsSink:
    """Return the sink that shows the progress, on the rank that writes the files.

    Args:
        config: its `progress` and `quiet` say how.
        infos: all ranks.
        title: the title of the live view.
    """
    if config.quiet or config.progress == "none":
        return MetricsSink()
    if config.progress == "plain":
        return PlainProgress()
    forced = config.progress == "live"
    try:
        return _open_live(infos, title, forced)
    except NoTerminalError as error:
        level = logging.WARNING if forced else logging.DEBUG
        _log.log(level, "no live view, printing plain lines instead: %s", error)
        return PlainProgress()


def _open_live(infos: Sequence[RankInfo], title: str, forced: bool) -> LiveView:
    owner = find_terminal(os.environ, forced=forced)
    screen = Screen(owner)
    columns, rows = screen.size()
    if columns < MIN_COLUMNS or rows < MIN_ROWS:
        screen.close()
        raise NoTerminalError(
            f"the terminal has {columns} columns and {rows} rows, fewer than {MIN_COLUMNS} and "
            f"{MIN_ROWS}"
        )
    places = {info.world_rank: Place(info.host, info.device, info.kind) for info in infos}
    return LiveView(screen, owner, ViewState(title, places), can_draw_unicode(os.environ))
