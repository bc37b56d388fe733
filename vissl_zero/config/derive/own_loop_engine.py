"""The engine of ``initialize``, and what those other than torch's cannot do there."""

from __future__ import annotations

from vissl_zero.errors import Problem, did_you_mean

ENGINES = ("torch", "fairscale")
_KEY = "zero.engine"


def engine_of(name: str) -> str:
    """``auto`` is torch."""
    return "torch" if name == "auto" else name


def engine_problems(
    name: str, level: int, *, is_half: bool, is_offloaded: bool, shard_group_size: int
) -> list[Problem]:
    """What cannot be done, each with the reason.

    Args:
        name: as given.
        level: ZeRO level.
        is_half: half precision is asked for, or comes with ``type=``.
        is_offloaded: the optimizer or parameters rest elsewhere.
        shard_group_size: -1: all ranks.
    """
    if engine_of(name) not in ENGINES:
        fix = did_you_mean(name, ENGINES).strip() or "Leave it out."
        return [Problem(_KEY, repr(name), "must be torch or fairscale", fix)]
    if name != "fairscale":
        return []
    cannot = {
        "at levels 0 and 3, which fairscale does not have in loops of one's own": level not in (1, 2),
        "with half precision, since fairscale keeps one copy of the parameters (fp16=False)": is_half,
        "with offload, which fairscale does not have": is_offloaded,
        "with shard_group_size, since fairscale shares one copy among all ranks": shard_group_size != -1,
    }
    fix = "Leave it out, or the other."
    return [Problem(_KEY, repr(name), f"must be torch {words}", fix) for words, is_so in cannot.items() if is_so]
