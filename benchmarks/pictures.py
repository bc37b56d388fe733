"""Makes the pictures of README and docs/gallery.md: trains the quickstart in a terminal and keeps what it shows.

python benchmarks/pictures.py docs/pictures [config.A.B=value ...]
"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

WIDTH, HEIGHT = 100, 30
# Between two frames, rich moves the cursor up and erases lines.
REDRAWN = re.compile(r"(?:\r|\x1b\[2K|\x1b\[1A)+")


def train(folder: str, overrides: list[str]) -> str:
    """Train the quickstart in a pseudo-terminal; returns everything it printed there."""
    shown = bytearray()

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 2**16)
        shown.extend(data)
        return data

    os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": str(HEIGHT)}
    command = [
        sys.executable,
        "-m",
        "vissl_zero.cli",
        "config=quickstart/swav_digits",
        f"config.CHECKPOINT.DIR={folder}",
    ]
    if pty.spawn([*command, *overrides], read):
        sys.exit("The run failed.")
    return shown.decode("utf-8", "replace").replace("\r\n", "\n")


def display(shown: str, to: Path) -> None:
    """Save the live display two thirds through the run as SVG."""
    frames = [frame for frame in REDRAWN.split(shown) if "images/s" in frame and "memory of rank 0" in frame]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(frames[2 * len(frames) // 3].strip("\n")))
    console.save_svg(str(to), title="vissl-zero config=quickstart/swav_digits")


def main() -> None:
    """See the module's docstring."""
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        shown = train(f"{folder}/run", sys.argv[2:])
        display(shown, target / "display.svg")
        # 256 colors are enough for a plot, and a third of the bytes.
        Image.open(f"{folder}/run/report.png").quantize(256).save(target / "report.png", optimize=True)


if __name__ == "__main__":
    main()
