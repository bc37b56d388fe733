"""``vissl-zero checkpoint diff``: what sets two checkpoints apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vissl_zero.checkpoint.comparison import TensorDifference, compare, facts_that_differ, settings_that_differ
from vissl_zero.checkpoint.reader import Checkpoint
from vissl_zero.checkpoint.weights import config_of
from vissl_zero.commands.checkpoint.terminal import Parser, opened, say, table
from vissl_zero.errors import CheckpointError, ConfigError

_MOST_ROWS = 40


def diff(arguments: Sequence[str]) -> int:
    """Print settings and tensors that differ; 0 if all tensors are equal, 1 if not.

    Raises:
        ConfigError, CheckpointError: the arguments, or what they name, are wrong.
    """
    parser = Parser(
        "diff",
        "Settings and tensors that differ; data are read in chunks.\nTwo checkpoints are compared as a whole, anything "
        "else by its weights.\nExit codes: 0 the tensors are equal, 1 they are not, 2 your input.",
    )
    parser.add_argument("a", metavar="A", help="run folder, checkpoint folder or safetensors file")
    parser.add_argument("b", metavar="B", help="likewise")
    parser.add_argument("--tolerance", type=float, default=0.0, help="largest absolute difference that is none (0)")
    parser.add_argument("--all", action="store_true", help=f"all rows, not only {_MOST_ROWS} of each table")
    options = parser.parse_args(arguments)
    if not options.tolerance >= 0:
        raise ConfigError(f"{parser.prog}: --tolerance must be 0 or more (got {options.tolerance}).")
    a, b = opened(options.a), opened(options.b)
    most = None if options.all else _MOST_ROWS
    try:
        for store in (a, b):
            if problems := list(store.verify()):
                raise CheckpointError("\n".join(problems))
        say(f"A {a.path}\nB {b.path}")
        if isinstance(a, Checkpoint) and isinstance(b, Checkpoint):
            _pairs("", facts_that_differ(a, b), most)
        one, other = (config_of(store).get("config", {}) for store in (a, b))
        if isinstance(one, Mapping) and isinstance(other, Mapping) and one and other:
            _pairs("config.", settings_that_differ(one, other), most)
        found = [entry for entry in compare(a, b) if not _is_within(entry, options.tolerance)]
    finally:
        a.close()
        b.close()
    return _report(found, options.tolerance, most)


def _is_within(entry: TensorDifference, tolerance: float) -> bool:
    return entry.largest is not None and entry.largest <= tolerance


def _pairs(prefix: str, pairs: Mapping[str, tuple[object, object]], most: int | None) -> None:
    if pairs:
        say("")
        rows = [(prefix + key, one, other) for key, (one, other) in pairs.items()]
        table(rows[:most], ("setting" if prefix else "", "A", "B"))
        _rest(len(rows), most)


def _report(found: list[TensorDifference], tolerance: float, most: int | None) -> int:
    within = f" within {tolerance:g}" if tolerance else ""
    if not found:
        say(f"\nAll tensors are equal{within}.")
        return 0
    say("")
    worst_first = sorted(found, key=lambda entry: (entry.largest is not None, -(entry.largest or 0.0), entry.name))
    rows = [
        (entry.name, entry.what, entry.text, "" if entry.largest is None else f"{entry.largest:.3g}")
        for entry in worst_first
    ]
    table(rows[:most], ("tensor", "differs in", "", "largest difference"), right=(3,))
    _rest(len(rows), most)
    names = {entry.name for entry in found}
    say(f"\n{len(names)} tensors differ{within}." if len(names) != 1 else f"\n1 tensor differs{within}.")
    return 1


def _rest(num_rows: int, most: int | None) -> None:
    if most is not None and num_rows > most:
        say(f"... and {num_rows - most} more; --all lists them.")
