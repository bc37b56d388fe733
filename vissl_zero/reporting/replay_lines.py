"""The lines that ``vissl-zero replay`` prints."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any

import torch

from vissl_zero.version import __version__

_FIGURES = (("loss", "loss"), ("gradient norm", "grad_norm"))
_MOST_SAMPLES = 20


def replay_lines(result: dict[str, Any], most_modules: int) -> list[str]:
    """Return the lines to print.

    Args:
        result: result of ``launch.replay.replay``.
        most_modules: most modules to show.
    """
    written = result["written"]
    ranks = "1 process" if result["world_size"] == 1 else f"{result['world_size']} processes"
    lines = [
        f"step {result['step']} of {result['recipe']}: {result['why']}",
        f"replayed at ZeRO level {result['level']} in {ranks}, in {result['precision']}",
        f"{'':14}{'captured':>24}{'replayed':>24}",
        *(f"{title:14}{written[key]:>24}{result[key]:>24}" for title, key in _FIGURES),
        _comparison(result),
    ]
    if first := result["first_not_finite"]:
        lines.append(f"the first module whose output is not finite: {first}")
    elif "nan" in result["loss"] or "inf" in result["loss"]:
        lines.append("every module's output is finite: the loss itself is what overflows")
    else:
        lines.append("every module's output is finite")
    if samples := result["samples_not_finite"]:
        named = ", ".join(f"{row['sample']} ({row['name']})" for row in samples[:_MOST_SAMPLES])
        lines.append(f"samples whose pixels are not finite, {len(samples)} of them: {named}")
    shown = _shown(result["modules"], most_modules)
    lines.append(f"largest absolute values, {len(shown)} of {len(result['modules'])} modules in the order of the pass:")
    width = max((len(row["name"]) for row in shown), default=0)
    lines.append(f"  {'module':{width}}{'activation':>12}{'gradient':>12}")
    lines += [f"  {row['name']:{width}}{_short(row['activation'])}{_short(row['gradient'])}" for row in shown]
    return lines


def _comparison(result: dict[str, Any]) -> str:
    written = result["written"]
    if result["is_equal"]:
        return "equal, bit for bit"
    others = [
        f"ZeRO level {written['level']}" if written["level"] != result["level"] else "",
        f"{written['world_size']} processes" if written["world_size"] != result["world_size"] else "",
        written["precision"] if written["precision"] != result["precision"] else "",
        f"vissl_zero {written['vissl_zero']}" if written["vissl_zero"] != __version__ else "",
        f"torch {written['torch']}" if written["torch"] != str(torch.__version__) else "",
        "compiled units" if written["compile"] else "",
    ]
    named = ", ".join(filter(None, others))
    if named:
        return f"not equal; it was captured with {named}"
    return "not equal, although state and batch are. A hook of your own, or the hardware, may be at fault"


def _shown(modules: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return the first module that is not finite, and modules with the largest finite values, in order of the pass."""
    first = next((row["name"] for row in modules if isinstance(row["activation"], str)), None)
    before = [{"name": "", "activation": None}, *modules]
    # A module that only returns the output of its last submodule adds nothing.
    modules = [
        row
        for row, last in zip(modules, before, strict=False)
        if not (last["name"].startswith(f"{row['name']}.") and last["activation"] == row["activation"])
    ]

    def largest(key: str) -> list[str]:
        finite = [row for row in modules if row[key] is not None and math.isfinite(float(row[key]))]
        return [row["name"] for row in sorted(finite, key=lambda row: -row[key])]

    # Taken in turn, so that the largest of both kinds are among the few that are shown.
    columns = zip_longest([first], largest("activation"), largest("gradient"))
    names = list(dict.fromkeys(name for column in columns for name in column if name))[:most]
    return [row for row in modules if row["name"] in names]


def _short(value: float | str | None) -> str:
    return f"{'-' if value is None else format(float(value), '.4g'):>12}"
