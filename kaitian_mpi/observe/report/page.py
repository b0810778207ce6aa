"""The report: one HTML file that needs neither a network nor scripts."""

from __future__ import annotations

import base64
import html
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from kaitian_mpi.observe.reading import duration, number_text
from kaitian_mpi.observe.report.figures import FIGURES, FigureSpec
from kaitian_mpi.observe.report.run import RecordedRun
from kaitian_mpi.observe.report.style import to_image

_MAX_ROWS = 200
_COMPARISON = "Runs side by side"
_STATES = {
    "finished": "The run is finished.",
    "stopped": "The run was stopped before its end.",
    "unfinished": "The run is not finished: it is still training, or has ended early.",
}


def make_page(runs: Sequence[RecordedRun], reload_sec: int = 0) -> str:
    """Return the report on one or more runs as an HTML page.

    Args:
        runs: the runs to show, the first as the reference of a comparison.
        reload_sec: the interval at which the page reloads itself; 0: never.

    Raises:
        UserError: matplotlib is not installed.
    """
    title = "Report on " + (runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    sections = [_run_section(run, number) for number, run in enumerate(runs, 1)]
    links = _links(runs)
    if len(runs) > 1:
        sections.insert(0, _comparison(runs))
    date = time.strftime("%Y-%m-%d %H:%M %Z")
    reload = f'\n<meta http-equiv="refresh" content="{reload_sec}">' if reload_sec else ""
    template = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    parts = {"title": _text(title), "date": _text(date), "reload": reload, "links": links}
    return template.substitute(parts, sections="".join(sections))


def _links(runs: Sequence[RecordedRun]) -> str:
    if len(runs) == 1:
        links = [("run1", "Summary"), *((f"run1-{spec.name}", spec.title) for spec in FIGURES)]
    else:
        links = [("comparison", _COMPARISON)]
        links += [(f"run{number}", f"Run {run.name}") for number, run in enumerate(runs, 1)]
    return "".join(f'<li><a href="#{place}">{_text(title)}</a></li>' for place, title in links)


def _comparison(runs: Sequence[RecordedRun]) -> str:
    first = runs[0].rate
    names = sorted({name for run in runs for name in run.results})
    columns = ["run", "state", "samples/s", "times the first", "training time"]
    columns += [f"held-out {name}" for name in names]
    rows = []
    for run in runs:
        row = [
            run.name + (" (emulated)" if run.emulated else ""),
            run.state,
            _number(run.rate),
            _number(run.rate / first if run.rate and first else None),
            duration(run.training_time_sec),
        ]
        row += [_number(run.results.get(name)) for name in names]
        rows.append(row)
    body = _table(columns, rows)
    heading = f'<h2 id="comparison">{_COMPARISON}</h2>'
    return f'<section aria-labelledby="comparison">\n{heading}\n{body}</section>\n'


def _number(value: float | None) -> str:
    return "not known" if value is None else number_text(value)


def _run_section(run: RecordedRun, number: int) -> str:
    figures = "".join(_figure(run, spec, f"run{number}-{spec.name}") for spec in FIGURES)
    heading = (
        f'<section aria-labelledby="run{number}">\n<h2 id="run{number}">Run {_text(run.name)}</h2>'
    )
    return "\n".join([heading, _summary(run), _rank_table(run), figures, "</section>\n"])


def _summary(run: RecordedRun) -> str:
    parts = [f"<p>{_STATES[run.state]}</p>"]
    if run.emulated:
        parts.append(
            '<p class="emulated"><strong>Emulated:</strong> kinds of devices or their speeds are '
            "emulated in this run. Its times and rates are not those of real hardware.</p>"
        )
    if run.missing:
        items = "".join(f"<li>{_text(reason)}</li>" for reason in run.missing)
        parts.append(f'<div class="missing"><p>What is missing:</p><ul>{items}</ul></div>')
    rows = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>"
        for name, value in run.facts.items()
    )
    if rows:
        parts.append(f'<dl class="facts">{rows}</dl>')
    return "\n".join(parts)


def _figure(run: RecordedRun, spec: FigureSpec, place: str) -> str:
    figure, words = spec.draw(run)
    alt = _text(words)
    if figure is None:
        shown = f"<p>Nothing to show. {alt}</p>"
    else:
        # An image keeps the figure's ids and scripts apart from the page.
        data = base64.b64encode(to_image(figure, "svg")).decode()
        image = f'<img alt="{alt}" src="data:image/svg+xml;base64,{data}">'
        caption = f"<figcaption>{_text(spec.explanation)}</figcaption>"
        shown = f'<figure><div class="wide">{image}</div>\n{caption}</figure>'
    table = {"batch-sizes": _plan_table, "events": _event_table}.get(spec.name)
    below = table(run) if table else ""
    return f'<h3 id="{place}">{_text(spec.title)}</h3>\n{shown}\n{below}'


def _rank_table(run: RecordedRun) -> str:
    lost = {rank for event in run.events if event.kind == "loss" for rank in event.ranks}
    rows = []
    for rank in run.ranks.values():
        notes = ["leader of its group"] * rank.is_leader + ["lost"] * (rank.rank in lost)
        kind = rank.kind + " (emulated)" * rank.emulated
        library = rank.library or "MPI"
        rows.append((str(rank.rank), rank.host, kind, rank.device, library, ", ".join(notes)))
    columns = ("rank", "host", "kind", "device", "communicates by", "notes")
    return _details(f"All ranks ({len(rows):,})", columns, rows)


def _plan_table(run: RecordedRun) -> str:
    rows = [
        (str(number or "first"), f"{plan.step:,}", _batches(plan.batch_sizes), plan.reason)
        for number, plan in enumerate(run.plans)
    ]
    columns = ("mark", "from step", "samples of each rank", "reason")
    return _details(f"All plans ({len(rows):,})", columns, rows)


def _event_table(run: RecordedRun) -> str:
    rows = [
        (f"{event.step:,}", duration(event.at_sec), event.kind.replace("_", " "), event.text)
        for event in run.events
    ]
    return _details(f"All events ({len(rows):,})", ("step", "after", "what", "details"), rows)


def _batches(sizes: Mapping[int, int]) -> str:
    shown = [f"{rank}: {size}" for rank, size in list(sizes.items())[:16]]
    return ", ".join(shown) + (f" and {len(sizes) - 16} more ranks" if len(sizes) > 16 else "")


def _details(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that opens with a click; "" without rows."""
    table = _table(columns, rows)
    return f"<details><summary>{_text(title)}</summary>{table}</details>\n" if rows else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(column)}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>"
        for row in rows[:_MAX_ROWS]
    )
    more = f"<p>and {len(rows) - _MAX_ROWS:,} more</p>" if len(rows) > _MAX_ROWS else ""
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{more}\n"
    )


def _text(value: str) -> str:
    return html.escape("".join(char if char.isprintable() else "�" for char in value))
