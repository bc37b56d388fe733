"""Which tensors of weights from elsewhere go where in a model of ours, and which do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vissl_zero.checkpoint.foreign_layouts import Foreign, as_token
from vissl_zero.checkpoint.shard_file import Entry
from vissl_zero.models.model import build_model
from vissl_zero.models.weight_names import to_our_names

COUNTERS = "num_batches_tracked"  # unused where batch norm has a momentum; older files lack it


@dataclass
class Match:
    """What fits and what does not. All names but ``unknown`` and ``no_tensors`` are ours.

    Attributes:
        entries: what fits, under our names.
        theirs: our name -> name in the file, of what fits.
        missing: of the model, and not in the file.
        other_shape: name -> (shape in the file, shape in the model); left out.
        unknown: names in the file that no tensor of the model has.
        no_tensors: entries of the file that are no tensors.
        num_foreign: tensors of the file.
    """

    entries: list[Entry] = field(default_factory=list)
    theirs: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    other_shape: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    no_tensors: list[str] = field(default_factory=list)
    num_foreign: int = 0

    def lacks(self, part: str) -> list[str]:
        """What of a part ("trunk", "heads") of the model did not get its tensor; batch norm's counters do not count."""
        names = [*self.missing, *self.other_shape]
        return sorted(name for name in names if name.startswith(f"{part}.") and not name.endswith(COUNTERS))

    def sentences(self, most: int = 10) -> Iterator[str]:
        """What did not match, a paragraph for each kind."""
        shapes = [
            f"{name} {list(theirs)} in the file, {list(ours)} here" for name, (theirs, ours) in self.other_shape.items()
        ]
        kinds = (
            ("other shape, left out", shapes),
            ("not in the file", [name for name in self.missing if not name.endswith(COUNTERS)]),
            ("not understood, left out", self.unknown),
            ("not plain tensors, left out", self.no_tensors),
        )
        for title, names in kinds:
            if names:
                rest = f"\n  ... and {len(names) - most} more" if len(names) > most else ""
                yield f"{len(names)} {title}:\n  " + "\n  ".join(names[:most]) + rest


def match(
    foreign: Foreign,
    shapes: Mapping[str, Sequence[int]] | None,
    remove_prefix: str = "",
    append_prefix: str = "",
    skip: Sequence[str] = (),
) -> Match:
    """Find our name for every tensor.

    Args:
        foreign: the weights.
        shapes: of the model's parameters and buffers by name; None: whatever has a name of ours is taken.
        remove_prefix: taken off the names that begin with it, first; then append_prefix is put before all.
        skip: names that contain one of these are left out, as VISSL's SKIP_LAYERS.
    """
    found = Match(no_tensors=list(foreign.no_tensors), num_foreign=len(foreign.entries))
    entries = [as_token(entry) for entry in foreign.entries]
    renamed = {append_prefix + entry.key.removeprefix(remove_prefix): entry for entry in entries}
    direct = {name: name for name in renamed if shapes is not None and name in shapes}
    ours = to_our_names((name for name in renamed if name not in direct), shapes or ())
    found.unknown += [renamed[name].key for name in ours.unknown]
    for name, old in {**ours.names, **direct}.items():
        entry = renamed[old]
        if any(part in name for part in skip):
            continue
        if shapes is not None and name not in shapes:
            found.unknown.append(entry.key)
        elif shapes is not None and tuple(shapes[name]) != entry.shape:
            found.other_shape[name] = (entry.shape, tuple(shapes[name]))
        else:
            found.entries.append(Entry(name, entry.dtype, entry.shape, entry.read))
            found.theirs[name] = entry.key
    taken = {*found.theirs, *found.other_shape}
    wanted = [name for name in shapes or () if name not in taken and not any(part in name for part in skip)]
    found.missing = sorted(wanted)
    return found


def shapes_of(model_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters and buffers of a model by full name; takes no memory for them.

    Args:
        model_config: ``config.MODEL`` after resolution.
    Raises:
        ConfigError: the model cannot be built.
    """
    with torch.device("meta"):
        model = build_model(model_config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
