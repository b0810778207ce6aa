"""The live page of a job that trains, in a real browser: through a lost rank until the job ends.

A browser ends its requests when network interfaces are made: bin/test has no other test make some.
"""

import io
import subprocess
import urllib.request
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from devtools import Browser
from jobs import PYTHON, Job, read_readings
from processes import assert_gone

from kaitian_mpi.observe.report.figures import FIGURES

pytest.importorskip("matplotlib", reason="needs the extra 'report'")
from PIL import Image  # matplotlib needs it

COMMAND = (
    "kaitian-train --model planted:slow --epochs 1000 --global-batch-size 12 --balance off "
    "--emulate-kinds a,b --run-dir run --log-interval 0 --dashboard 0"
)
ARE_DRAWN = """[...document.images].every(image => image.complete && image.naturalWidth > 100)
    && document.images.length"""
TILES = """Object.fromEntries([...document.querySelectorAll('#numbers dl > div')].map(
    tile => [tile.querySelector('dt').textContent, tile.querySelector('.value').textContent]))"""
FOCUS = """(() => { const style = getComputedStyle(document.activeElement);
    return [document.activeElement.textContent, style.outlineStyle, style.outlineWidth]; })()"""
# Texts of less contrast than 4.5 with what is behind them, as WCAG 2.2 asks for at level AA.
PALE = """(() => {
    const parts = color => color.match(/[0-9.]+/g).map(Number);
    const linear = part => (part /= 255) <= 0.04045
        ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const luminance = ([red, green, blue]) =>
        0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
    const behind = element => {
        for (; element; element = element.parentElement) {
            const color = parts(getComputedStyle(element).backgroundColor);
            if (color.length < 4 || color[3] === 1) return color;
        }
        return [255, 255, 255];
    };
    const pale = [];
    for (const element of document.body.querySelectorAll("*")) {
        const own = [...element.childNodes].some(n => n.nodeType === 3 && n.nodeValue.trim());
        if (!own || element.matches("script, style, title, [hidden]")) continue;
        const style = getComputedStyle(element);
        const inSvg = element.closest("svg"), color = parts(inSvg ? style.fill : style.color);
        if (inSvg && color.every(part => part === 255)) continue;  // on a mark of its own
        const light = [luminance(color), luminance(behind(element))].sort((a, b) => b - a);
        if ((light[0] + 0.05) / (light[1] + 0.05) < 4.5) pale.push(element.outerHTML);
    }
    return pale;
})()"""
FIGURES_SHOWN = "new URL(document.images[0].src).search"
SVG_SIZES = """[...document.querySelectorAll('figure svg')].map(svg => {
    const box = svg.getBoundingClientRect();
    return [box.width, box.height, svg.getAttribute("aria-label")];
})"""
BLUE = (0x00, 0x72, 0xB2)  # of rank 0


@pytest.fixture
def job(tmp_path):
    with Job(2, *COMMAND.split(), cwd=tmp_path, fresh=False) as job:
        yield job


@pytest.fixture
def browser(tmp_path):
    with Browser(tmp_path / "browser") as browser:
        yield browser


def find_server(url):
    """Return the process that listens."""
    port = urlsplit(url).port
    listens = psutil.CONN_LISTEN
    (found,) = (
        connection.pid
        for connection in psutil.net_connections("tcp4")
        if connection.status == listens and connection.laddr == ("127.0.0.1", port)
    )
    return found


def assert_shown(tiles, folder):
    """Check that the page's numbers are those of one reading."""
    step = int(tiles["step"].replace(",", ""))
    (reading,) = (line for line in read_readings(folder / "run") if line["step"] == step)
    assert tiles["training loss"] == f"{reading['loss']:.4g}"
    assert float(tiles["ms per step"]) == pytest.approx(1000 * reading["step_time_sec"], rel=0.01)


def assert_only_unanswered(browser):
    """Check that the browser complains of nothing but a server that has gone."""
    gone = "net::ERR_CONNECTION_", "net::ERR_EMPTY_RESPONSE"
    assert [text for text in browser.complaints if not any(word in text for word in gone)] == []


def test_a_browser_watches_a_job_through_the_loss_of_rank_0(job, browser, tmp_path):
    url = job.wait_for(r"dashboard: (http://127\.0\.0\.1:\d+/[\w-]{20,}/) ")[1]
    first = find_server(url)
    job.wait_for(r"\| step 2/")
    browser.open(url)
    browser.wait_for("document.readyState === 'complete'")
    assert browser.wait_for(ARE_DRAWN) == len(FIGURES)
    for spec in FIGURES:
        with urllib.request.urlopen(f"{url}figures/{spec.name}.svg") as answer:
            assert b"could not be drawn" not in answer.read()
    for image in browser.value("[...document.images].map(image => image.alt)"):
        assert "EMULATED" in image
    tiles = browser.value(TILES)
    assert_shown(tiles, tmp_path)
    assert browser.value("document.querySelectorAll('#ranks tbody tr').length") == 2
    picture = np.asarray(Image.open(io.BytesIO(browser.screenshot())).convert("RGB"))
    assert (picture == BLUE).all(axis=2).sum() > 100
    assert picture.shape[1] == 1280
    assert browser.value("document.documentElement.scrollWidth") == 1280

    browser.press("Tab")
    assert browser.value(PALE) == []
    assert browser.value(FOCUS) == ["Pause updates", "solid", "3px"]
    browser.press("Enter", "\r")
    assert browser.value(FOCUS)[0] == "Resume updates"
    browser.press("Enter", "\r")

    browser.wait_for(f"({TILES})['step'] !== '{tiles['step']}'")
    assert browser.complaints == []
    figures = browser.value(FIGURES_SHOWN)
    job.kill(0)
    moved = job.wait_for(r"dashboard: (http://\S+) ")[1]
    assert moved == url
    assert_gone([first], limit_sec=2)
    browser.wait_for(f"{FIGURES_SHOWN} !== '{figures}'")
    assert browser.wait_for(ARE_DRAWN) == len(FIGURES)
    browser.wait_for("document.querySelector('#events').textContent.includes('lost')")
    assert_shown(browser.value(TILES), tmp_path)
    assert browser.value("document.querySelector('#connection').textContent") == "live"
    assert_only_unanswered(browser)

    second = find_server(url)
    job.kill(1)
    assert_gone([second], limit_sec=2)
    browser.wait_for("document.querySelector('#connection').className === 'lost'")
    assert browser.value(ARE_DRAWN) == len(FIGURES)
    browser.resize(400)
    assert browser.value("document.documentElement.scrollWidth") == 400
    check_report(browser, tmp_path)


def check_report(browser, folder):
    """Check the report on the job that was killed."""
    done = subprocess.run(
        [PYTHON, "-m", "kaitian_mpi.cli.report", "run"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "report in run/report.html\n"
    browser.open((folder / "run" / "report.html").as_uri())
    browser.wait_for("document.readyState === 'complete'")
    sizes = browser.value(SVG_SIZES)
    assert len(sizes) == browser.value("document.querySelectorAll('figure').length") >= 5
    assert all(width > 500 and height > 100 and "EMULATED" in alt for width, height, alt in sizes)
    text = browser.value("document.body.innerText")
    readings = read_readings(folder / "run")
    assert f"training: {readings[-1]['loss']:.4g}" in browser.value("document.body.textContent")
    assert "not finished" in text
    assert "rank 0 lost" in browser.value("document.body.textContent")
    assert browser.value(PALE) == []
    assert browser.value("document.querySelectorAll('h1').length") == 1
    for width in (400, 1280):
        browser.resize(width)
        assert browser.value("document.documentElement.scrollWidth") == width
    picture = np.asarray(Image.open(io.BytesIO(browser.screenshot())).convert("RGB"))
    assert (picture == BLUE).all(axis=2).sum() > 100
    assert_only_unanswered(browser)
