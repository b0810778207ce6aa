"""The figures of the report: what stands in them, and in the words beside them."""

import base64
import json
import re

import pytest
from unit.report_runs import START, make_run, reading, write_json, write_lines

from kaitian_mpi.observe.reading import number_text
from kaitian_mpi.observe.report import page
from kaitian_mpi.observe.report.figures import FIGURES, _slow_period
from kaitian_mpi.observe.report.page import make_page
from kaitian_mpi.observe.report.rank_figures import batch_series, step_times
from kaitian_mpi.observe.report.run_files import read_run

SMALLEST = 9  # points
UNITS = ("step", "(s)", "(ms)", "(%)", "%", "samples", "(mean per sample)", "rank", "as reported")
BY_NAME = {spec.name: spec for spec in FIGURES}
NUMBERS = {
    "rate": ["640 samples/s"],
    "batch-sizes": ["rank 1 (gpu) 16", "planned again 2 times", "rank 1 (gpu) 12, rank 2 (mlu) 22"],
    "utilization": ["rank 0 (gpu) 80%", "rank 3 (mlu) 80%"],
    "step-phases": ["100 ms per step", "wait 10 to 10 ms"],
    "learning": ["from 1.333 to", "held-out results at step 200: loss 0.2, accuracy 0.8"],
    "events": ["new plan 1", "slow rank 1", "lost rank 1", "rank 3 (node-b, cpu, mlu)"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(make_run(tmp_path_factory.mktemp("runs") / "run"))


@pytest.fixture(scope="module")
def figures(run):
    return {spec.name: spec.draw(run) for spec in FIGURES}


def texts_of(figure):
    from matplotlib.text import Text

    return [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_figure_names_its_units_numbers_and_that_it_is_emulated(figures, name):
    figure, words = figures[name]
    assert all(number in words for number in (*NUMBERS[name], "EMULATED")), words
    assert "EMULATED" in figure.get_suptitle()
    assert BY_NAME[name].title in figure.get_suptitle()
    assert min(text.get_fontsize() for text in texts_of(figure)) >= SMALLEST
    for axes in figure.axes:
        if axes.axison:
            below = axes.get_shared_x_axes().get_siblings(axes)
            x_label = "".join(other.get_xlabel() for other in below)
            assert any(unit in x_label for unit in UNITS), x_label
            names_rows = [label.get_text() for label in axes.get_yticklabels()]
            is_number = not any(re.search("[a-z]", name) for name in names_rows)
            assert not is_number or any(unit in axes.get_ylabel() for unit in UNITS)


def test_each_new_plan_is_explained_and_a_real_run_not_called_emulated(
    run, figures, tmp_path, monkeypatch
):
    shown = [text.get_text() for text in texts_of(figures["batch-sizes"][0])]
    assert {"1", "2", "rank 3 lost"} <= set(shown)
    monkeypatch.setattr(page, "FIGURES", [BY_NAME["batch-sizes"]])
    text = make_page([run])
    assert "<td>1</td><td>60</td><td>0: 24, 1: 8, 2: 16, 3: 16</td><td>rank 1 (node-a" in text
    assert "<td>rank 3 (node-b, cpu, mlu) was lost</td>" in text
    monkeypatch.setattr(page, "FIGURES", FIGURES[:1])
    real = read_run(make_run(tmp_path / "run", emulated=False))
    figure, words = FIGURES[0].draw(real)
    assert "EMULATED" not in words + figure.get_suptitle()
    assert "mulated" not in make_page([real]).partition("<main")[2]


def test_what_is_drawn_is_what_was_measured(run):
    assert batch_series(run)["rank 1 (gpu)"] == [(0, 16), (60, 8), (100, 12), (200, 12)]
    assert batch_series(run)["rank 3 (mlu)"][-1] == (100, 16)
    (slow,) = (event for event in run.events if event.kind == "slow")
    assert _slow_period(run, slow) == (pytest.approx(5.2), pytest.approx(18.0))
    for first, last in ((0, 60), (60, 100), (100, 200)):
        for parts in step_times(run, first, last).values():
            assert sum(parts.values()) == pytest.approx(0.1)
            assert parts["other"] == pytest.approx(0.005)


def test_a_thousand_ranks_are_drawn_as_the_means_of_their_kinds(tmp_path):
    folder = make_run(tmp_path / "run")
    many = range(1000)
    ranks = [{"world_rank": r, "host": f"host-{r // 8}", "kind": "cuda"} for r in many]
    write_json(folder / "topology.json", {"ranks": ranks, "groups": []})
    write_lines(folder / "metrics.jsonl", [reading(step, many) for step in (10, 20, 30)])
    plan = {"step": 0, "time": START, "batch_sizes": [8] * 1000, "ranks": [*many], "reason": ""}
    write_lines(folder / "plan.jsonl", [plan])
    run = read_run(folder)
    of_kind = "cuda: mean of its ranks"
    for name, value in (("utilization", "80%"), ("batch-sizes", "8")):
        figure, words = BY_NAME[name].draw(run)
        assert f"{of_kind} {value}" in words
        (label,) = figure.axes[0].get_legend_handles_labels()[1]
        assert label == f"{of_kind}: {value}"
    axes = BY_NAME["step-phases"].draw(run)[0].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [of_kind]


def test_a_folder_with_a_single_file_gives_a_page(tmp_path):
    for name, drawn in (
        *(("config.json", []), ("topology.json", []), ("plan.jsonl", ["batch-sizes"])),
        ("metrics.jsonl", ["rate", "utilization", "step-phases", "learning"]),
    ):
        folder = make_run(tmp_path / name)
        for path in folder.iterdir():
            if path.name != name:
                path.unlink()
        run = read_run(folder)
        assert len(run.missing) >= 4
        assert [spec.name for spec in FIGURES if spec.draw(run)[0] is not None] == drawn


def test_numbers_have_no_exponents():
    numbers = (0.00123456, 0.5, 12.345, 999.4, 999.6, 1180.4, 1_234_567.0)
    assert [number_text(number, 3) for number in numbers] == [
        *("0.00123", "0.5", "12.3", "999", "1,000", "1,180", "1,234,567"),
    ]


IMAGE = "data:image/svg+xml;base64,"
EVIL = "<script>alert('$x_1$')</script>\"&\u202e\u0007日本"
TAG = re.compile(r'<(/?)([a-z0-9]+)((?: [a-z-]+="[^"<>]*")*)>')


def test_the_page_is_self_contained_escaped_and_accessible(tmp_path):
    folder = make_run(tmp_path / "run", host=EVIL)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_lines(folder / "metrics.jsonl", [lines[0] | {"logged": {EVIL: 1.0}}, *lines[1:]])
    events = [{"step": 1, "time": START, "kind": EVIL, "text": EVIL, "ranks": [1]}]
    write_lines(folder / "events.jsonl", events)
    text = make_page([read_run(folder)])
    tags = TAG.findall(text.removeprefix("<!DOCTYPE html>\n"))
    assert len(tags) == text.count("<") - 1
    opened, found = [], []
    for end, name, more in tags:
        if end:
            assert opened.pop() == name
            continue
        opened += [name] * (name not in ("meta", "img"))
        found.append((name, dict(re.findall('([a-z-]+)="(.*?)"', more))))
    assert opened == []
    names = [name for name, _ in found]
    assert not {"script", "link", "iframe", "object", "svg"} & set(names)
    assert "alert(" in text
    for key, value in ((k, v) for _, attributes in found for k, v in attributes.items()):
        assert not key.startswith("on")
        assert key not in ("src", "href") or value.startswith(("#", IMAGE))
    assert "url(http" not in text
    assert "@media (prefers-color-scheme: dark)" in text
    assert "\u202e" not in text
    ids = [attributes["id"] for _, attributes in found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for name, a in found if name == "a"} <= set(ids)
    images = [attributes for name, attributes in found if name == "img"]
    assert len(images) == names.count("figure") == names.count("figcaption") >= 5
    for image in images:
        drawn = base64.b64decode(image["src"].removeprefix(IMAGE)).decode()
        assert "EMULATED" in image["alt"]
        assert "EMULATED" in drawn
        assert "<script" not in drawn
    assert names.count("h1") == 1
    assert names.count("details") == names.count("summary") == 3
    assert ("html", {"lang": "en"}) in found
