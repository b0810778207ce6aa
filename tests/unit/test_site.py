"""The documentation as a site: complete, without broken links, and without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import browse

import kaitian_mpi

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs/site/mkdocs.yml"
# What a browser loads by itself; links that a reader may follow are others.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|audio|video)\b[^>]*?\ssrc=["']?([^"'\s>]+)"""
    r"""|<link\b(?![^>]*rel=["']?canonical)[^>]*?\shref=["']?([^"'\s>]+)"""
)


pytestmark = pytest.mark.thorough  # building it takes seconds; test_docs.py reads the pages


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as bin/docs does; any warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    command += ["--config-file", CONFIG, "--site-dir", folder]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site):
    return [page for page in site.rglob("*.html") if page.name != "404.html"]


def test_every_page_of_the_documentation_is_in_the_site_and_every_name(site):
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.name).with_suffix(".html").exists()
    for page, text in (
        ("index", "Quick start"),
        ("source/examples/gpt.py", "CosineAnnealingLR"),
        ("source/hostfiles", "slots"),
        *(("api", f'id="kaitian_mpi.{n}"') for n in kaitian_mpi.__all__ if n != "__version__"),
    ):
        assert text in (site / f"{page}.html").read_text()


def test_the_site_loads_nothing_from_a_network(site):
    for page in pages(site):
        loaded = [script or link for script, link in LOADED.findall(page.read_text())]
        assert len(loaded) > 3, page
        for target in loaded:
            if target.startswith("data:"):
                continue
            assert "//" not in target, f"{page.name} loads {target}"
            assert (page.parent / target.partition("#")[0].partition("?")[0]).exists(), target
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(https?:)?//", sheet.read_text()), sheet


def test_the_search_works_in_pages_opened_from_a_disk(site, tmp_path):
    url = f"file://{site}/index.html?q=LoadAdaptiveSampler"
    found = browse(url, tmp_path, "--dump-dom")
    assert re.search(r"[1-9]\d* matching documents?", found)
    assert "api.html?h=" in found
