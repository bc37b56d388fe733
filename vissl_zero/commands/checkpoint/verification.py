"""``vissl-zero checkpoint verify``: is everything there, and as it was written?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vissl_zero.checkpoint.folder import find_checkpoints
from vissl_zero.checkpoint.manifest import MANIFEST_NAME
from vissl_zero.checkpoint.reader import open_checkpoint
from vissl_zero.checkpoint.weights import WeightsFile, open_store
from vissl_zero.commands.checkpoint.terminal import Parser, say
from vissl_zero.errors import CheckpointError
from vissl_zero.reporting.quantity import bytes_text


def verify(arguments: Sequence[str]) -> int:
    """Read every byte against its checksum; 0 if all is complete and undamaged, 1 if not.

    Raises:
        CheckpointError: the path names nothing that could be verified.
    """
    parser = Parser(
        "verify",
        "Read everything against the checksums: of a run folder, all its checkpoints.\n"
        "Exit codes: 0 complete, 1 incomplete or damaged, 2 your input.",
    )
    parser.add_argument("path", nargs="+", help="run folder, checkpoint folder or safetensors file")
    options = parser.parse_args(arguments)
    is_complete = [_verify(path) for text in options.path for path in _meant(Path(text).expanduser())]
    return 0 if all(is_complete) else 1


def _meant(path: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first; else what the path is."""
    if not path.is_dir() or (path / MANIFEST_NAME).exists():
        if path.is_dir() or path.suffix == ".safetensors":
            return [path]
        open_store(path).close()  # says what else is wrong
        return [path]
    if found := find_checkpoints(path)[::-1]:
        return found
    if path.name.startswith("step_") or any(path.glob("rank*.json")):
        return [path]  # one that has lost its manifest
    store = open_store(path)  # the weights of a run folder, or an error that says what to give
    store.close()
    return [store.path]


def _verify(path: Path) -> bool:
    try:
        if path.is_dir():
            with open_checkpoint(path) as checkpoint:
                problems = list(checkpoint.verify())
                num_bytes, what = sum(rank.num_bytes for rank in checkpoint.ranks.values()), "all checksums fit"
        else:
            file = WeightsFile(path)
            try:
                problems = list(file.verify())
            finally:
                file.close()
            num_bytes = sum(info.num_bytes for info in file.tensors.values())
            what = "all checksums fit" if file.has_checksums else "it carries no checksums; its length is right"
    except CheckpointError as error:
        problems = [str(error)]
    for problem in problems:
        say(problem)
    if problems:
        say(f"INCOMPLETE OR DAMAGED: {path}", style="bold red")
    else:
        say(f"complete: {path} ({bytes_text(num_bytes)}, {what})")
    return not problems
