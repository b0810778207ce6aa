"""What the live view, plain lines and the end of a run show."""

import io
import os
import struct
import termios
import types
from fcntl import ioctl

import pytest
from choices import by_default
from rich.cells import cell_len
from rich.console import Console
from test_metrics import reading as any_reading

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.observe import progress
from kaitian_mpi.observe.live import LiveProgress
from kaitian_mpi.observe.progress import Outcome, PlainProgress, open_progress
from kaitian_mpi.observe.reading import Event, Figures, duration
from kaitian_mpi.observe.sink import MetricsSink


def reading(ranks=3, **others):
    usual = {
        **{"step": 12, "total_steps": 40, "epochs": 4, "epoch_fraction": 0.25},
        **{"samples_per_sec": 1234.56, "step_time_sec": 0.1, "seconds_left": 3725.0},
        "ranks": list(range(ranks)),
        "batch_sizes": [60 + rank for rank in range(ranks)],
        "compute_time_sec": [0.09 - 0.001 * rank for rank in range(ranks)],
        "wait_time_sec": [0.001 * rank for rank in range(ranks)],
        "data_time_sec": [0.0] * ranks,
    }
    return any_reading(**{**usual, **others})


def event(kind, ranks=(), step=5, time=1.5e9, **details):
    return Event(step=step, time=time, kind=kind, text=f"{kind}!", ranks=ranks, details=details)


INFOS = [
    types.SimpleNamespace(world_rank=n, host=f"node-{n % 2}", device=f"cuda:{n}", kind="gpu")
    for n in range(64)
]


def evaluated(**values):
    return Figures(step=12, epoch=1, time=0.0, values=values)


def terminal(width=80, height=20, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    size = {"width": width, "height": height}
    return Console(file=file, **size, force_terminal=True, color_system=None)


def shown(*calls, width=100, height=21, encoding="utf-8"):
    """Return the rows of a view after some calls of (method, argument)."""
    console = terminal(width, height, encoding)
    view = LiveProgress("kaitian-train run", INFOS, console)
    for method, argument in calls:
        getattr(view, method)(argument)
    view.close(True)
    last = console.file.buffer.getvalue().decode(encoding).rpartition("\x1b[2K")[2]
    return last.removesuffix("\n\x1b[?25h").removesuffix("\x1b[?25h").rstrip().splitlines()


def test_view_has_bars_figures_and_a_row_for_each_rank():
    logged = {"a\x1b[2Jb\nc": 1.0}  # which must not move the cursor
    name, epoch, run, figures, head, _, second, *rest = shown(
        ("on_reading", reading(logged=logged)),
        ("on_evaluation", evaluated(loss=1.5, accuracy=0.625)),
    )
    assert name.rstrip() == "kaitian-train run"
    assert (epoch[:13], epoch[-17:]) == ("epoch 2/4 ━━━", " 25%   step 12/40")
    assert (run[:13], run[-16:]) == ("      run ━━━", "30% 1:02:05 left")
    assert figures.startswith(
        "loss 1.2346 | 1,234.6 samples/s | held-out loss 1.5000 | held-out accuracy 0.6250 | "
        "a?[2Jb?c 1"
    )
    assert head.split() == "rank host device kind batch compute ms wait ms busy".split()
    assert second.split()[:8] == ["1", "node-1", "cuda:1", "gpu", "61", "89.0", "1.0", "89%"]
    assert len(rest) == 1


def test_the_last_ranks_row_ends_so_that_mpirun_passes_it_on():
    console = terminal()
    LiveProgress("kaitian-train run", INFOS, console).on_reading(reading())
    *_, last, unfinished = console.file.buffer.getvalue().decode().split("\n")
    assert last.split()[:3] == ["2", "node-0", "cuda:2"]
    assert "node" not in unfinished


@pytest.mark.parametrize("width", by_default([72, 80, 120, 200], [72, 200]))
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_line_is_wider_than_the_terminal(width, encoding):
    rows = shown(
        ("on_reading", reading(ranks=5, logged={"a figure of the script's own": 1.0})),
        ("on_evaluation", evaluated(accuracy=0.5, loss=2.0)),
        ("on_event", event("slow", [3], cause="communication")),
        width=width,
        encoding=encoding,
    )
    assert max(map(cell_len, rows)) <= width
    assert len(rows) == 10
    for row in rows[5:]:
        assert "%" in row  # the busy share is there in any width
    whole = "loss 1.2346|1,234.6 samples/s|held-out accuracy 0.5000|held-out loss 2.0000|"
    whole += "a figure of the script's own 1|learning rate 0.1"
    assert set(rows[3].rstrip().split(" | ")) <= set(whole.split("|"))  # none is cut


def test_as_many_ranks_are_shown_as_fit_and_slow_and_lost_ones_named():
    rows = shown(("on_reading", reading(ranks=64)), width=80, height=12)
    assert [int(row.split()[0]) for row in rows[5:-1]] == list(range(6))
    assert (rows[-1].rstrip(), len(rows)) == ("and 58 more ranks", 12)
    slow = [("on_reading", reading(ranks=2)), ("on_event", event("slow", [1], cause="compute"))]
    assert shown(*slow)[6].rstrip().endswith("slow: compute")
    assert "slow" not in shown(*slow, ("on_event", event("slow_end", [1])))[6]
    lost = shown(*slow, ("on_event", event("loss", [2])))
    assert "lost rank 2" in lost[3]
    assert "slow" not in lost[6]


def test_what_is_printed_meanwhile_appears_above_the_view_and_the_cursor_is_shown(capsys):
    console = terminal()
    view = LiveProgress("run", INFOS, console)

    def written():
        return console.file.buffer.getvalue().decode()

    view.on_reading(reading())
    assert written().rpartition("\x1b[?25")[2].startswith("h")
    before = len(written())
    print("a line")
    assert written()[before:].index("a line") < written()[before:].index("epoch 2/4")
    view.on_event(event("finish"))
    print("the end")
    assert capsys.readouterr().out == "the end\n"
    view.close(True)


def test_a_live_view_is_chosen_only_for_a_terminal(monkeypatch):
    for size, settings, expected in (
        ((80, 24), {}, PlainProgress),
        ((80, 24), {"progress": "live"}, LiveProgress),
        ((0, 0), {"progress": "live"}, PlainProgress),  # Open MPI's, where mpirun has none
        ((70, 24), {"progress": "live"}, PlainProgress),
        (None, {"progress": "live"}, PlainProgress),
        ((80, 24), {"progress": "none"}, MetricsSink),
        ((80, 24), {"progress": "live", "quiet": True}, MetricsSink),
        ((80, 24), {"progress": "live", "TERM": "dumb"}, PlainProgress),
    ):
        monkeypatch.setenv("TERM", settings.pop("TERM", "xterm"))
        ends = os.openpty() if size else os.pipe()
        if size:
            ioctl(ends[0], termios.TIOCSWINSZ, struct.pack("HHHH", *reversed(size), 0, 0))
        with open(ends[1], "w") as stdout:
            monkeypatch.setattr(progress.sys, "stdout", stdout)
            chosen = open_progress(TrainingConfig(**settings), INFOS, "run")
        os.close(ends[0])
        assert type(chosen) is expected


def test_time_left_and_the_number_of_epochs_are_shown_only_if_known(capsys):
    known = {"epoch": 1, "epochs": 4, "seconds_left": 65.0}
    for changed, epoch, left in (
        ({}, "epoch 2/4", "1:05 left"),
        ({"seconds_left": None}, "epoch 2/4", None),
        ({"epochs": 0}, "epoch 2", "1:05 left"),
    ):
        values = {**known, **changed}
        PlainProgress().on_reading(reading(**values))
        parts = capsys.readouterr().out.rstrip().split(" | ")
        assert parts[0] == epoch
        assert parts[4:] == [left] * (left is not None)
        rows = shown(("on_reading", reading(**values)))
        assert rows[1].lstrip().startswith(f"{epoch} ")
        assert rows[2].rstrip().endswith(left or "%")


def outcome(*readings, events=(), folder="run", **others):
    sink = Outcome(folder, emulated=False, **others)
    sink.on_event(event("start", step=0, time=100.0))
    for interval in readings:
        sink.on_reading(interval)
    sink.on_evaluation(evaluated(accuracy=0.75))
    for event_told in events:
        sink.on_event(event_told)
    return sink.lines(event("finish", step=40, time=165.0))


def two_ranks(compute, wait, data=(0.0, 0.0), **others):
    times = {"compute_time_sec": compute, "wait_time_sec": wait, "data_time_sec": data}
    usual = {"batch_sizes": [60, 30], "samples_per_sec": 900.0, "steps": 10}
    return reading(ranks=2, **{**usual, **times, **others})


def test_outcome_divides_by_the_ranks_own_speeds_and_advises_on_what_costs_most():
    for readings, devices in (
        # Rank 0 computes 750 samples/s and rank 1 500: 900 of 1250.
        (
            [two_ranks([0.08, 0.06], [0.01, 0.03], [0.01, 0.01])],
            "72% of their combined speed (900.0 of 1,250.0 samples/s); lost to communication 10%, "
            "loading data 10%, other 8%",
        ),
        # A rank without samples has no speed.
        (
            [two_ranks([0.09, 0.0], [0.01, 0.1], batch_sizes=[90, 0])],
            "90% of their combined speed (900.0 of 1,000.0 samples/s); lost to communication 10%",
        ),
        ([], "not measured, because no step was trained"),
    ):
        reached, used, _ = outcome(*readings)
        loss = " | loss 1.2346" * len(readings)
        assert reached == f"finish!, in 1:05{loss} | held-out accuracy 0.7500"
        assert used == f"devices: {devices}"
    for compute, wait, data, advice in (
        ([0.05, 0.05], [0.05, 0.05], [0.0, 0.0], "--global-batch-size reduces it"),
        ([0.05, 0.05], [0.0, 0.0], [0.05, 0.05], "--workers"),
        ([0.09, 0.02], [0.0, 0.08], [0.0, 0.0], "kaitian-plan"),
        ([0.05, 0.05], [0.0, 0.0], [0.0, 0.0], "between steps"),
        ([0.1, 0.1], [0.0, 0.0], [0.0, 0.0], "kaitian-report run shows the run"),
    ):
        lines = outcome(two_ranks(compute, wait, data))[2]
        assert lines.startswith("next: ")
        assert advice in lines.split(";")[0]
    for crosses_hosts in (False, True):
        waiting = two_ranks([0.05, 0.05], [0.05, 0.05])
        assert ("--wire" in outcome(waiting, crosses_hosts=crosses_hosts)[2]) is crosses_hosts
    slow = [event("slow", [1]), event("slow", [0]), event("slow_end", [0])]
    lost = [event("loss", [3]), event("loss", [2])]
    lines = outcome(two_ranks([0.05, 0.05], [0.05, 0.05]), events=[*slow, *lost])
    assert lines[2:] == ["note: loss!; loss!; slow!", "next: kaitian-report run shows the run"]
    assert "--run-dir to keep" in outcome(two_ranks([0.1, 0.1], [0.0, 0.0]), folder="")[2]
    seconds = None, 0.4, 59.6, 754, 11229
    assert [*map(duration, seconds)] == ["", "0:00", "1:00", "12:34", "3:07:09"]
