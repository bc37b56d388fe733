"""Hooks of the documentation site (`make docs`): pages outside ``docs/`` join it, and their links keep working.

The same Markdown must read well in a checkout, where ``README.md`` links to ``docs/sharding.md``, and on the site,
where it is ``index.md`` beside ``sharding.md``. So links are rewritten while the site is built; nothing is kept twice.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Path in the checkout -> path on the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PAGES |= {"SECURITY.md": "security.md", "UPGRADING.md": "upgrading.md"}
PAGES |= {f"benchmarks/{path.name}": f"benchmarks/{path.name}" for path in sorted((ROOT / "benchmarks").glob("*.md"))}
# A browser would download a program; a page shows it.
PROGRAMS = {f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted((ROOT / "examples").glob("*.py"))}
PICTURES = [path.relative_to(ROOT) for path in sorted((ROOT / "benchmarks").glob("*.svg"))]
SITE = PAGES | PROGRAMS
VERSION = re.compile(r'__version__ = "(.+)"')
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Name the version in the header of every page."""
    version = VERSION.search((ROOT / "vissl_zero/version.py").read_text())
    assert version is not None
    config.site_name = f"{config.site_name} {version[1]}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures that live outside ``docs/``."""
    for source, target in PAGES.items():
        text = _relinked((ROOT / source).read_text(), (ROOT / source).parent, Path(target).parent)
        files.append(File.generated(config, target, content=text))
    for source, target in PROGRAMS.items():
        text = f"# `{source}`\n```python\n{(ROOT / source).read_text()}```\n"
        files.append(File.generated(config, target, content=text))
    for picture in PICTURES:
        files.append(File.generated(config, str(picture), content=(ROOT / picture).read_bytes()))
    for source, text in _pages_of_keys().items():
        if found := files.get_file_from_path(source):
            files.remove(found)
        files.append(File.generated(config, source, content=text))
    return files


def _pages_of_keys() -> dict[str, str]:
    """Split ``docs/keys.md``, one file in a checkout, into a page for each block, and ``keys.md``, which lists them."""
    header, *tables = re.split(r"^## ", (ROOT / "docs/keys.md").read_text(), flags=re.MULTILINE)
    blocks: dict[str, list[str]] = {}
    for table in tables:
        title = table.split("\n", 1)[0]
        path = re.match(r"`config(?:\.(\w+))?", title)
        name = (path[1] or "config") if path else title.split(" `")[0] + "s"
        blocks.setdefault(name, []).append(table)
    pages, rows = {}, ["| block | keys of |", "| --- | --- |"]
    for name, parts in blocks.items():
        file = name.replace(" ", "_")
        titles = [part.split("\n", 1)[0] for part in parts]
        rows.append(f"| [{name}](keys/{file}.md) | {', '.join(titles)} |")
        pages[f"keys/{file}.md"] = "\n".join(
            [f"# Keys: {name}", "[All blocks](../keys.md)\n", *("## " + p for p in parts)]
        )
    return {"keys.md": "\n".join([header, *rows, ""]), **pages}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave ``docs/`` at the pages that were added."""
    if page.file.generated_by is not None:
        return markdown
    return _relinked(markdown, ROOT / "docs" / Path(page.file.src_uri).parent, Path(page.file.src_uri).parent)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """End a docstring's sentence before code with one colon; refuse a table that Markdown takes for text."""
    assert "| ---" not in html, f"{page.file.src_path}: a table needs a blank line before it"
    return html.replace("::</p>", ":</p>")


def _relinked(markdown: str, folder: Path, site_folder: Path) -> str:
    """``markdown`` of a page in ``folder``, its links as ``site_folder`` of the site sees their targets.

    A link to a file that the site does not hold (source code) becomes its path. A link to nothing stays, so
    that the strict build fails on it.
    """

    def replace(match: re.Match[str]) -> str:
        bang, text, link, anchor = match.groups(default="")
        target = (folder / link).resolve()
        if not (target.is_relative_to(ROOT) and target.exists()):
            return match[0]
        path = target.relative_to(ROOT).as_posix()
        if not (path in SITE or path.startswith("docs/") or Path(path) in PICTURES):
            return f"`{path}`" if text.strip("`").rstrip("/") == path else f"{text} (`{path}`)"
        path = SITE.get(path, path).removeprefix("docs/")
        return f"{bang}[{text}]({'../' * len(site_folder.parts)}{path}{anchor})"

    return LINK.sub(replace, markdown)
