"""Verifies that all ranks train the same model in the same way: before sharding, and before every update."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.errors import VisslZeroError


class ModelsDifferError(VisslZeroError):
    """The ranks did not build the same model, so that training it together would be wrong from the first step."""


def require_equal_models(model: nn.Module, device: torch.device) -> None:
    """Compare parameters and buffers across ranks: names, shapes, ``requires_grad``, and values by checksums.

    Every rank must call it. Tensors on the meta device have no values yet and are compared by name and shape.

    Raises:
        ModelsDifferError: on every rank, with the first parameter that differs.
    Cost: a gather of a few bytes, one all-reduce of 4 numbers per tensor; one pass over the tensors.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    params = list(model.named_parameters())
    named = [*params, *model.named_buffers()]
    require_equal("parameters or buffers", [f"{name}, of shape {tuple(t.shape)}" for name, t in named])
    require_equal("what is trained", [f"requires_grad={p.requires_grad} of {name}" for name, p in params])
    sums = torch.stack([_checksum(tensor) for _, tensor in named]).to(device)
    _require_equal_values([name for name, _ in named], sums)


def require_equal(what: str, facts: Sequence[str]) -> None:
    """Compare ``facts`` across ranks. Collective over the world; every rank calls it with the same ``what``.

    Raises:
        ModelsDifferError: on every rank, with the first fact that differs.
    Cost: a gather of 8 bytes a rank; more only where it raises.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16])
    if len(set(digests)) == 1:
        return
    # Digests differ: only now send the facts themselves, to name the first that does.
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, list(facts))
    other = next(rank for rank, found in enumerate(lists) if found != lists[0])
    pairs = zip_longest(lists[0], lists[other], fillvalue="nothing")
    first, second = next((a, b) for a, b in pairs if a != b)
    raise ModelsDifferError(
        f"The ranks differ in {what}: rank 0 has {first}, rank {other} has {second}. "
        "Build model, optimizer and settings in the same way on every rank."
    )


@contextmanager
def equal_values(
    fill: Callable[[nn.Module, str], None], model: nn.Module, device: torch.device
) -> Iterator[Callable[[nn.Module, str], None]]:
    """``fill``, for sharding ``model`` within; what it gave to parameters on the meta device is compared afterwards.

    Raises:
        ModelsDifferError: on every rank, with the first parameter that differs.
    Cost: one all-reduce of 4 numbers per tensor; one pass over the tensors.
    """
    bare = {name for name, param in model.named_parameters() if param.is_meta}
    sums: dict[str, Tensor] = {}

    def filled(module: nn.Module, name: str) -> None:
        fill(module, name)
        for key, param in module.named_parameters(prefix=name):
            if key in bare - sums.keys():  # more than this may have been filled with what is in it
                sums[key] = _checksum(param)

    yield filled
    if collectives.world_size() > 1 and sums:
        _require_equal_values(list(sums), torch.stack(list(sums.values())).to(device))


def _require_equal_values(names: Sequence[str], sums: Tensor) -> None:
    if differing := _differing(sums):
        raise ModelsDifferError(
            f"The ranks start from different weights: {names[differing[0]]} differs between them. "
            "Draw the initial weights from one seed, or load them from one file, on every rank."
        )


class StepCheck:
    """Compares, before every update, what must be the same on all ranks.

    Args:
        device: of the model; used where the process group has no CPU backend.
    """

    def __init__(self, device: torch.device):
        self._is_needed = collectives.world_size() > 1
        self._device = device
        # The facts are the host's: on the CPU they need no wait for a GPU.
        if self._is_needed and "cpu" in dist.get_backend_config():
            self._device = torch.device("cpu")

    def require_equal(
        self, problem: str | None, facts: Mapping[str, int], marks: Sequence[bool] = ()
    ) -> Sequence[bool]:
        """Raise on every rank if one of them has a problem, or if facts differ.

        Args:
            problem: why this rank cannot update.
            facts: numbers of 32 bits by what they say; the same names on every rank.
            marks: equally many on every rank.
        Returns:
            For each mark whether any rank has set it.
        Raises:
            VisslZeroError: on every rank; nothing was updated.
        Cost: one all-reduce of a few numbers, and 8 bytes for each mark.
        """
        if self._is_needed:
            values = [int(problem is not None), *facts.values()]
            sent = [*values, *(-value for value in values), *marks]
            bounds = torch.tensor(sent, dtype=torch.int64, device=self._device)
            dist.all_reduce(bounds, dist.ReduceOp.MAX)
            found = bounds.tolist()
            # Ranks agree on a value where its maximum is its minimum.
            has_problem, *differs = (found[i] != -found[i + len(values)] for i in range(len(values)))
            marks = [bool(mark) for mark in found[2 * len(values) :]]
            if problem is None and has_problem:
                raise VisslZeroError("No update was made: another rank cannot continue; see its message.")
            if problem is None and (names := [fact for fact, d in zip(facts, differs, strict=True) if d]):
                raise VisslZeroError(f"No update was made: the ranks differ in {names[0]}.")
        if problem is not None:
            raise VisslZeroError(problem)
        return marks


def digest_of(*values: object) -> int:
    """32 bits of the text of ``values``; the same in every process."""
    return zlib.crc32(repr(values).encode())


def _checksum(param: Tensor) -> Tensor:
    """Two numbers (2,) that change with any value and with the order of values, rare coincidences apart."""
    if param.is_meta or not param.numel() or param.is_complex():
        return torch.zeros(2, dtype=torch.float64)
    # NaN is unequal to itself, so equal models that hold one would be refused.
    flat = param.detach().flatten().nan_to_num()
    flat = flat if flat.is_floating_point() else flat.double()
    ramp = torch.linspace(1.0, 2.0, flat.numel(), dtype=flat.dtype, device=flat.device)
    return torch.stack([flat.sum(dtype=torch.float64), (flat * ramp).sum(dtype=torch.float64)])


def _differing(values: Tensor) -> list[int]:
    """Rows of ``values`` that are not the same on every rank; the same list everywhere."""
    # One maximum of a value and of its negative gives both bounds in a single message.
    bounds = torch.stack([values, -values])
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    rows = (bounds[0] != -bounds[1]).reshape(len(values), -1).any(dim=1)
    return rows.nonzero().flatten().tolist()
