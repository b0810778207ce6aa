"""The page as HTML: the run's progress, its figures, its ranks and its events."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from html import escape

from kaitian_mpi.observe.dashboard.assets import SCRIPT, STYLE
from kaitian_mpi.observe.dashboard.live_run import FolderState, LiveRun
from kaitian_mpi.observe.report.figures import FigureSpec
from kaitian_mpi.observe.report.run import Interval, Rank, Run

_MAX_EVENTS = 12
_COMPUTE_PHASES = ("forward", "backward", "optimizer", "compute")
_COLUMNS = (
    *("rank", "kind", "batch", "busy", "compute, ms", "wait, ms", "data, ms", "host", "device"),
)
_DASH = "\N{EN DASH}"


def render_page(live: LiveRun, state: FolderState, drawn: str, nonce: str) -> str:
    """Return the page as a browser opens it.

    Args:
        live: the run folder and its figures.
        state: what was read from the folder.
        drawn: the version of the state that the figures show.
        nonce: by which the browser accepts the page's own script and style, and no others.
    """
    head = f"""<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<noscript><meta http-equiv="refresh" content="10"></noscript>
<style nonce="{nonce}">{STYLE}</style>"""
    script = f'<script nonce="{nonce}">{SCRIPT}</script>'
    return _document(live, state, drawn, head, script)


def render_update(live: LiveRun, state: FolderState, drawn: str) -> str:
    """Return the page without style and script, from which an open page updates itself."""
    return _document(live, state, drawn, "", "")


def _document(live: LiveRun, state: FolderState, drawn: str, head: str, script: str) -> str:
    run = state.run
    name = live.folder.name if run is None else run.name
    title = " \N{MIDDLE DOT} ".join(filter(None, (_reached(run), name, "kaitian_mpi")))
    folder = escape(str(live.folder))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{escape(title)}</title>
{head}
</head>
<body data-version="{state.version}" data-figures="{drawn}">
<header>
<h1>{escape(name)}</h1>
<p id="marks" data-live>{_marks(state)}</p>
<p id="connection" role="status">live</p>
<button id="pause" type="button" hidden>Pause updates</button>
</header>
<main>
<section id="numbers" aria-label="Where the run is" data-live>{_numbers(run)}</section>
<section id="faults" aria-label="What is missing" data-live>{_faults(state)}</section>
<section id="figures" aria-label="Figures">{_figures(live, run, drawn)}</section>
<section aria-labelledby="ranks-title"><h2 id="ranks-title">Ranks</h2>
<div id="ranks" class="wide" tabindex="0" role="region" aria-labelledby="ranks-title" data-live>
{_ranks(run)}</div></section>
<section aria-labelledby="events-title"><h2 id="events-title">Events</h2>
<div id="events" data-live>{_events(run)}</div></section>
</main>
<footer><p>Run folder {folder}, read at
<span id="read-at" data-live>{time.strftime("%H:%M:%S")}</span>.
<code>kaitian-report {folder}</code> makes a file of it.</p></footer>
{script}
</body>
</html>
"""


def _reached(run: Run | None) -> str:
    if run is None or not run.intervals:
        return ""
    last = run.intervals[-1]
    total = f"/{last.total_steps}" if last.total_steps else ""
    return f"step {last.step}{total}"


def _marks(state: FolderState) -> str:
    """Return labels of the run's state, and of whether it is emulated."""
    run = state.run
    if run is None:
        return _mark("starting", "quiet")
    begun = "training" if run.intervals else "starting: no step measured yet"
    if state.minutes_old:
        begun = "not finished"
    text = {"finished": "finished", "stopped": "stopped"}.get(run.state, begun)
    marks = [_mark(text, "good" if run.state == "finished" else "quiet")]
    if run.emulated:
        marks.append(_mark("emulated devices", "warn"))
    return " ".join(marks)


def _mark(text: str, look: str) -> str:
    return f'<span class="mark {look}">{escape(text)}</span>'


def _numbers(run: Run | None) -> str:
    if run is None or not run.intervals:
        return "<p>The first numbers come with the first steps.</p>"
    last = run.intervals[-1]
    tiles = [_progress_tile(last), *_epoch_tile(last)]
    tiles.append(_tile("training loss", _number(last.loss)))
    if run.evaluations:
        tiles += [
            _tile(f"held-out {name}", _number(value), f"after step {run.evaluations[-1].step}")
            for name, value in run.evaluations[-1].values.items()
        ]
    tiles.append(_tile("samples/s", _number(last.samples_per_sec, 4)))
    tiles.append(_tile("ms per step", _number(_milliseconds(last.step_time_sec))))
    tiles += [_tile(name, _number(value)) for name, value in last.logged.items()]
    return f"<dl>{''.join(tiles)}</dl>"


def _progress_tile(last: Interval) -> str:
    if not last.total_steps:
        return _tile("step", f"{last.step:,}")
    share = min(1.0, last.step / last.total_steps)
    left = (last.total_steps - last.step) * (last.step_time_sec or math.nan)
    note = f"of {last.total_steps:,}" + (f", {_clock(left)} left" if left >= 0 else "")
    bar = f'<progress value="{share:.4f}" max="1" aria-label="steps done">{share:.0%}</progress>'
    return _tile("step", f"{last.step:,}", note, bar)


def _epoch_tile(last: Interval) -> list[str]:
    if last.epoch is None:
        return []
    return [_tile("epoch", str(last.epoch + 1))]


def _tile(name: str, value: str, note: str = "", more: str = "") -> str:
    small = f'<span class="note">{escape(note)}</span>' if note else ""
    shown = f'<span class="value">{escape(value)}</span>{small}{more}'
    return f"<div><dt>{escape(name)}</dt><dd>{shown}</dd></div>"


def _faults(state: FolderState) -> str:
    faults = [state.fault] if state.fault else []
    if not faults:
        return ""
    return f"<ul>{''.join(f'<li>{escape(fault)}</li>' for fault in faults)}</ul>"


def _figures(live: LiveRun, run: Run | None, drawn: str) -> str:
    return "".join(_figure(spec, _alt(spec, run), drawn) for spec in live.specs.values())


def _figure(spec: FigureSpec, alt: str, drawn: str) -> str:
    name, title = escape(spec.name), escape(spec.title)
    return (
        f'<figure id="figure-{name}" data-version="{drawn}">'
        f"<figcaption><h2>{title}</h2></figcaption>"
        f'<a href="figures/{name}.svg" aria-label="{title}, alone"><picture>'
        f'<source media="(max-width: 40rem)" srcset="narrow/{name}.svg?v={drawn}">'
        f'<img src="figures/{name}.svg?v={drawn}" alt="{escape(alt)}">'
        f"</picture></a><p>{escape(spec.explanation)}</p></figure>"
    )


def _alt(spec: FigureSpec, run: Run | None) -> str:
    if run is None:
        return f"{spec.title}: nothing to show yet"
    try:
        return spec.alt(run)
    except Exception:  # drawing it fails as well, and says why
        return spec.title


def _ranks(run: Run | None) -> str:
    if run is None or not run.ranks:
        return "<p>No ranks known yet.</p>"
    last = run.intervals[-1] if run.intervals else None
    head = "".join(f'<th scope="col">{title}</th>' for title in _COLUMNS)
    rows = "".join(_row(rank, last) for _, rank in sorted(run.ranks.items()))
    about = f"Means over the steps until step {last.step:,}" if last else "No step measured yet"
    return (
        f"<table><caption>{about}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _row(rank: Rank, last: Interval | None) -> str:
    kind = f"{rank.kind} (emulated)" if rank.emulated else rank.kind
    cells = [f"<td>{escape(kind or _DASH)}</td>"]
    cells += (f'<td class="figure">{cell}</td>' for cell in _times(last, rank.rank))
    cells += (
        f"<td>{escape(word or _DASH)}</td>" for word in (rank.host, rank.device_name or rank.device)
    )
    return f'<tr><th scope="row">{rank.rank}</th>{"".join(cells)}</tr>'


def _times(last: Interval | None, rank: int) -> Iterable[str]:
    """Return a rank's batch size, utilization and times, over the last steps."""
    if last is None or rank not in last.ranks:
        trains = last is None
        return (_DASH if trains else "not training", *(_DASH,) * 4)
    place = last.ranks.index(rank)
    batch = str(last.batch_sizes[place]) if last.batch_sizes else _DASH
    compute = _of_rank(last, _COMPUTE_PHASES, place)
    wait, data = _of_rank(last, ("wait",), place), _of_rank(last, ("data",), place)
    share = None
    if compute is not None and last.step_time_sec:
        share = compute / last.step_time_sec
    busy = _DASH if share is None else f"{min(share, 1):.0%}"
    return (batch, busy, *(_number(_milliseconds(sec)) for sec in (compute, wait, data)))


def _of_rank(last: Interval, phases: Sequence[str], place: int) -> float | None:
    """Return the sum of a rank's phases, in seconds; None if none is known."""
    found = [last.phases[phase][place] for phase in phases if phase in last.phases]
    known = [seconds for seconds in found if math.isfinite(seconds)]
    return sum(known) if known else None


def _events(run: Run | None) -> str:
    if run is None or not run.events:
        return "<p>Nothing yet.</p>"
    events = sorted(run.events, key=lambda event: event.at_sec)
    saved = [event for event in events if event.kind == "checkpoint"]
    # Of the checkpoints, only the newest is of interest.
    newest = [event for event in events if event.kind != "checkpoint" or event is saved[-1]]
    items = (
        f'<li><span class="when">{_clock(event.at_sec)} \N{MIDDLE DOT} step '
        f"{event.step:,}</span> {escape(event.text or event.kind)}</li>"
        for event in reversed(newest[-_MAX_EVENTS:])
    )
    return f'<ol class="events">{"".join(items)}</ol>'


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _number(value: float | None, digits: int = 4) -> str:
    """Return a number with this many significant digits; large ones whole, with commas."""
    if value is None or not math.isfinite(value):
        return _DASH
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
