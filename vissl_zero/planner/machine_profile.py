"""Profiles of machines: the rates of one rank, by which the time of a plan is estimated. Imports no torch.

A profile is part of the package and has a name, or is a file of the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from vissl_zero.atomic import read_regular
from vissl_zero.config.recipes import require_moderate
from vissl_zero.errors import ConfigError, Problem, did_you_mean

_KEY = "config.ZERO.MACHINE_PROFILE"
_MAX_BYTES = 2**16


@dataclass(frozen=True)
class MachineProfile:
    """The rates of one rank.

    Attributes:
        name: name of the machine, as messages print it.
        flops: floating-point operations per second of matrix products in float32.
        half_flops: floating-point operations per second of matrix products in float16 or bfloat16.
        memory: bytes per second of the memory in which the rank computes.
        near_link, far_link: bytes per second that a rank sends to others on its machine, and to other machines.
        host: bytes per second between device and host memory.
        disk: bytes per second of a rank's share of a local disk.
        operation_s: seconds of overhead of one operation.
        convolution_share: rate of convolutions over that of matrix products, forward and backward.
        fresh: bytes per second at which the system provides fresh memory, on a CPU; None: free of cost.
        block_s: seconds of overhead of a large block of fresh memory.
        reduce_link: bytes per second that a rank sends in an all-reduce on its machine; None: ``near_link``.
        message_s: seconds of a collective over a few numbers.
        transfer_s: seconds of overhead when level 3 gathers or reduces a unit, on a CPU.
        memory_gb: GiB on a rank's device; None: use this machine's device, or an assumed one.
        capability: NVIDIA's compute capability of a rank's GPU; None: unknown, or no GPU.
        source: where the rates were measured or published.
    """

    name: str
    flops: float
    half_flops: float
    memory: float
    near_link: float
    far_link: float
    host: float
    disk: float
    operation_s: float
    convolution_share: float = 1.0
    fresh: float | None = None
    block_s: float = 0.0
    reduce_link: float | None = None
    message_s: float = 0.0
    transfer_s: float = 0.0
    memory_gb: float | None = None
    capability: float | None = None
    source: str = ""


def profile_names() -> list[str]:
    """List the names of the package's profiles."""
    return sorted(path.name.removesuffix(".yaml") for path in _folder().iterdir() if path.name.endswith(".yaml"))


def read_profile(profile: str) -> MachineProfile:
    """Read a profile by its name in the package, or by the path of a YAML file with its fields.

    Raises:
        ConfigError: there is no such profile, or it has problems; all are named.
    """
    text = _text(profile)
    try:
        require_moderate(text)
        entries = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise _wrong(profile, f"must be YAML ({str(error).splitlines()[0]})", "Correct the file.") from error
    if not isinstance(entries, Mapping):
        raise _wrong(profile, "must map the names of rates to numbers", f"See {_folder() / 'h100x8.yaml'}.")
    if problems := list(_problems(profile, entries)):
        raise ConfigError(problems)
    strings = {"name", "source"}
    values: dict[str, Any] = {key: str(value) if key in strings else float(value) for key, value in entries.items()}
    return MachineProfile(**values)


def _text(profile: str) -> str:
    if profile in profile_names():
        return (_folder() / f"{profile}.yaml").read_text(encoding="utf-8")
    path = Path(profile).expanduser()
    try:
        return read_regular(path, _MAX_BYTES, follow_links=True).decode()
    except (OSError, ValueError) as error:  # a zero byte in the path, or bytes that are not UTF-8
        known = f"Known: {', '.join(profile_names())}.{did_you_mean(profile, profile_names())}"
        raise _wrong(profile, "must be a profile that ships, or a YAML file that can be read", known) from error


def _problems(profile: str, values: Mapping[Any, Any]) -> Any:
    known = {item.name for item in fields(MachineProfile)}
    for key in values:
        if key not in known:
            near = did_you_mean(str(key), sorted(known))
            yield Problem(f"{_KEY}: {profile}", repr(key), "is not a field of a machine", f"Leave it out.{near}")
    for item in fields(MachineProfile):
        value: Any = values.get(item.name)
        if item.name == "name" and not value:
            yield Problem(f"{_KEY}: {profile}", "", "lacks name", "Say what the machine is.")
        elif item.name not in ("name", "source") and (item.name in values or item.default is MISSING):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < float("inf"):
                got = "" if value is None else repr(value)
                fix = "Write 1.0e+9 for 1e9, which YAML reads as text." if isinstance(value, str) else "Correct it."
                yield Problem(f"{_KEY}: {profile}: {item.name}", got, "must be a number above 0", fix)


def _folder() -> Any:
    return files("vissl_zero.planner") / "machines"


def _wrong(profile: str, must: str, fix: str) -> ConfigError:
    return ConfigError([Problem(_KEY, repr(profile), must, fix)])
