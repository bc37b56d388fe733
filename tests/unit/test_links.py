"""Each link to elsewhere was looked up: ``benchmarks/links.md`` has the day of the copy that it was found in."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks/links.md"
EXAMPLES = ("example.org", "example.com", "localhost", "127.0.0.1", "registry")
LINK = re.compile(r"https?://[^\s)>\]`\"'|]+")


def links(text: str) -> set[str]:
    found = {link.rstrip(".,;:") for link in LINK.findall(text)}
    return {link for link in found if not any(name in link for name in EXAMPLES)}


def test_each_external_link_is_listed_with_a_day():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    written = set().union(*(links(page.read_text()) for page in pages if page != TABLE))
    rows = [row.split(" | ") for row in TABLE.read_text().splitlines() if row.startswith("| http")]
    listed = {row[0].removeprefix("| ") for row in rows}
    assert sorted(written - listed) == [] and sorted(listed - written) == []
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d \|", row[2]) for row in rows)
