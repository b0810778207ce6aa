"""Makes pages of the site of what lies outside docs/: the README, and the files that pages link to.

A link such as `../examples/gpt.py` is right in a clone. In the site, it leads to a page that shows
the file, or all files of a folder.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages of the repository's top level, and what they are called in the site."""
LINK = re.compile(r"(\]\()(?![a-z]+:|#|/)([^)#\s]+)")
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the top level's pages, and one for each file or folder that a page links to."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for file in list(files.documentation_pages()):
        for _, link in LINK.findall(file.content_string):
            target = _in_repository(file.src_uri, link)
            name = _in_site(target)
            if name.startswith("source/") and name not in files.src_uris:
                files.append(File.generated(config, name, content=_source_page(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave docs/ lead to the pages that stand for their targets."""
    here = posixpath.dirname(page.file.src_uri)

    def to_site(link: re.Match[str]) -> str:
        target = _in_site(_in_repository(page.file.src_uri, link[2]))
        return link[1] + posixpath.relpath(target, here or ".")

    return markdown if here == "source" else LINK.sub(to_site, markdown)


def _in_repository(page: str, link: str) -> str:
    """Return the path in the repository to which a link in a page of the site leads."""
    originals = {name: source for source, name in PAGES.items()}
    original = originals.get(page) or f"docs/{page}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(original), link))


def _in_site(target: str) -> str:
    """Return the page, or the picture, that shows a path of the repository."""
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"source/{target}.md"


def _source_page(target: str) -> str:
    """Return a page that shows a file, or all files of a folder and of those in it."""
    path = (ROOT / target).resolve()
    if not path.is_relative_to(ROOT) or not path.exists():
        return f"# {target}\n\n[missing]({target})\n"  # which the strict build then reports
    shown = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    lines = ["---", "search: {exclude: true}", "---", f"# {target}", ""]
    for file in shown:
        if "__pycache__" in file.parts:
            continue
        if path.is_dir():
            lines += [f"## {file.relative_to(path)}", ""]
        lines += [f"~~~~~~{LANGUAGES.get(file.suffix, 'text')}", file.read_text(), "~~~~~~", ""]
    return "\n".join(lines)
