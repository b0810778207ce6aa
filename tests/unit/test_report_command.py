"""`kaitian-report`: its files and each of its errors."""

import sys
from types import SimpleNamespace

import pytest
from unit.report_runs import make_run

from kaitian_mpi.cli import report
from kaitian_mpi.observe.report import page
from kaitian_mpi.observe.report.figures import FIGURES


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command with one figure; return its exit code, its output and its errors."""
    for module in (page, report):
        monkeypatch.setattr(module, "FIGURES", FIGURES[-1:])

    def run_command(*arguments):
        monkeypatch.setattr(sys, "argv", ["kaitian-report", *map(str, arguments)])
        try:
            report.main()
            code = 0
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run_command


def test_a_page_is_written_into_the_run_folder_and_missing_files_are_reported(run, tmp_path):
    folder = make_run(tmp_path / "run")
    before = {path.name for path in folder.iterdir()}
    assert run(folder) == (0, f"report in {folder}/report.html\n", "")
    assert {path.name for path in folder.iterdir()} - before == {"report.html"}
    (folder / "summary.json").write_text("{")
    code, _, err = run(folder)
    assert (code, err) == (0, f"{folder}: summary.json cannot be read: not valid JSON\n")
    assert "summary.json cannot be read" in (folder / "report.html").read_text()


def test_several_runs_are_compared_in_one_page_and_as_images(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [make_run(tmp_path / "fast"), make_run(tmp_path / "slow")]
    found = run(*folders, "--images", "images")
    assert found == (0, "report in report.html, images in images\n", "")
    text = (tmp_path / "report.html").read_text()
    assert text.count("<img ") == 2
    assert "<td>slow (emulated)</td><td>finished</td><td>640</td><td>1</td>" in text
    images = {path.name for path in (tmp_path / "images").iterdir()}
    assert images == {"run1-events.png", "run2-events.png"}
    assert not (folders[0] / "report.html").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(folders[0])
    assert (code, err.count("\n"), "kaitian-mpi[report]" in err) == (2, 1, True)


@pytest.mark.parametrize("end", ["the run finishes", "Ctrl-C"])
def test_a_watched_page_reloads_itself_until_the_end(run, tmp_path, monkeypatch, end):
    folder = make_run(tmp_path / "run")
    finished = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text("{}")
    refresh, looks = '<meta http-equiv="refresh" content="10">', []

    def sleep(seconds):
        looks.append((folder / "report.html").read_text())
        if len(looks) == 2:
            if end == "Ctrl-C":
                raise KeyboardInterrupt
            (folder / "summary.json").write_text(finished)

    monkeypatch.setattr(report, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(report.os, "nice", lambda more: None)
    code, out, _ = run(folder, "--watch")
    assert (code, out.splitlines()[-1]) == (0, f"report in {folder}/report.html")
    assert [refresh in page for page in looks] == [True, True]
    assert refresh not in (folder / "report.html").read_text()
