"""Real models through ``initialize``: each cell trains what plain torch trains in one process, or is refused.

A cell is a model of ``zoo.py``, a loop, a number of ranks and a ZeRO level, in float64. One pytest test runs the four
levels of one model, loop and number of ranks on the suite's pool; ``make test-models`` runs all of them and prints a
line per cell and a table.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vissl_zero
from tests.models.libraries import LIBRARIES, library_of
from tests.models.zoo import BASE, ZOO, Entry
from tests.ranks import RankError, preload, run_on_ranks

TOLERANCE = 1e-9  # relative to the largest element of a tensor, or to 1
# Where statistics of few values are divided by, or a model computes in float32 inside, plain torch itself does not
# repeat its numbers when its sums run in another order; a cell is then held to a multiple of that.
NOISE_FACTOR, MOST_NOISE = 30.0, 1e-6
EXACT, REFUSED, DIFFERENT, CRASH = "exact", "refused", "DIFFERENT", "CRASH"


def _two_groups(model: nn.Module, build: Callable[..., Any], **options: Any) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    large, small = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "lr": 3e-4, "weight_decay": 0.0}]
    return build([group for group in groups if group["params"]], lr=1e-3, **options)


def _lamb(params: Any, **options: Any) -> torch.optim.Optimizer:
    from timm.optim import Lamb

    return Lamb(params, max_grad_norm=None, **options)


ADAM = {"lr": 1e-3, "eps": 1e-4}  # gradients that are zero but for rounding must not be divided by themselves


@dataclass(frozen=True)
class Way:
    """An optimizer and a loop.

    Attributes:
        plain: the optimizer of plain torch, from a model.
        given: what ``initialize`` is given, from a model; None: what ``plain`` builds.
        zero: further keys of ``zero``.
        num_micro_batches: per update.
        num_calls: forward passes per backward pass.
        is_frozen: every third parameter is not trained.
        is_clipped_by_hand: ``clip_grad_norm_`` by the loop.
        is_resumed: ``state_dict`` into a fresh model after the first step; ``"folder"``: ``save`` and ``load``.
        has_evaluation: a pass in eval mode without gradients after each step.
        refused: what is said above level 0, where the optimizer cannot run on shards; empty: it is exact.
    """

    plain: Callable[[nn.Module], torch.optim.Optimizer]
    given: Callable[[nn.Module], Any] | None = None
    zero: dict[str, Any] = field(default_factory=dict)
    num_micro_batches: int = 1
    num_calls: int = 1
    is_frozen: bool = False
    is_clipped_by_hand: bool = False
    is_resumed: str = ""
    has_evaluation: bool = False
    refused: str = ""


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _dict(name: str, **options: Any) -> dict[str, Any]:
    """``plain`` and ``given`` of an optimizer that is given as a dict."""
    build = _lamb if name == "LAMB" else getattr(torch.optim, name)
    return {
        "plain": lambda model: build(_trained(model), **options),
        "given": lambda model: {"type": name, **options},
    }


WAYS = {
    "sgd": Way(**_dict("SGD", lr=0.01, momentum=0.9, weight_decay=1e-3)),
    "adamw_groups": Way(lambda model: _two_groups(model, torch.optim.AdamW, eps=1e-4)),
    "adam_clip_accumulate": Way(**_dict("Adam", **ADAM), zero={"clip_grad": 0.1}, num_micro_batches=2),
    "rmsprop_two_calls": Way(
        plain=lambda model: torch.optim.RMSprop(_trained(model), lr=1e-4, eps=1e-3),
        given=lambda model: functools.partial(torch.optim.RMSprop, lr=1e-4, eps=1e-3),
        num_calls=2,
    ),
    "adagrad_frozen": Way(lambda model: torch.optim.Adagrad(_trained(model), lr=1e-3, eps=1e-3), is_frozen=True),
    "adam_over_frozen": Way(lambda model: torch.optim.Adam(model.parameters(), **ADAM), is_frozen=True),
    "nadam_evaluated": Way(lambda model: torch.optim.NAdam(model.parameters(), **ADAM), has_evaluation=True),
    "adamw_resumed": Way(**_dict("AdamW", **ADAM), is_resumed="state", num_micro_batches=2),
    "adam_saved_frozen": Way(**_dict("Adam", **ADAM), is_resumed="folder", is_frozen=True),
    "sgd_kept_gradients": Way(**_dict("SGD", lr=0.01), zero={"keep_gradients": True}, is_clipped_by_hand=True),
    "adamw_threshold": Way(**_dict("AdamW", **ADAM), zero={"wrap_threshold": 200}),
    "lamb": Way(**_dict("LAMB", lr=1e-3, eps=1e-4, weight_decay=0.01)),
}
ENTRIES = ZOO | LIBRARIES


def _of_pytorch_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    import pytorch_optimizer as library

    if name in WRAPPERS:
        optimizer = getattr(library, name)(torch.optim.AdamW(_trained(model), **ADAM), **WRAPPERS[name])
        if name == "ScheduleFreeWrapper":
            optimizer.train()
        return optimizer
    return library.load_optimizer(name)(_trained(model), lr=1e-3)


WRAPPERS: dict[str, dict[str, Any]] = {"Lookahead": {"k": 2}, "OrthoGrad": {}, "ScheduleFreeWrapper": {}}
# fmt: off
OPTIMIZERS = (
    "accsgd", "adabelief", "adabound", "adagc", "adai", "adamg", "adamp", "adams", "adan", "adapnm", "ademamix",
    "adopt", "aggmo", "aida", "alice", "amos", "apollo", "avagrad", "came", "conda",
    "diffgrad", "fromage", "grams",
    "lamb", "lars", "lion", "madgrad", "qhadam", "sgdp", "shampoo", "sm3", "soap",
    "stableadamw", "tiger", "yogi", *WRAPPERS,
)
# fmt: on
# What they compute from all gradients cannot be told from one rank's.
OF_ALL_TENSORS = dict.fromkeys(("adagc", "adai", "adams", "avagrad"), "must update each tensor from that tensor")
WAYS |= {
    f"pytorch_optimizer.{name}": Way(
        functools.partial(_of_pytorch_optimizer, name), refused=OF_ALL_TENSORS.get(name, "")
    )
    for name in OPTIMIZERS
}
QUICK = [name for name in WAYS if name != "lamb" and "." not in name]


# --- the two runs ----------------------------------------------------------------------------------------------------


def _fresh(entry: Entry, way: Way) -> nn.Module:
    torch.manual_seed(0)
    model = entry.build()
    model.train()
    if way.is_frozen:
        for param in list(model.parameters())[::3]:
            param.requires_grad_(False)
    return model


def _loss(entry: Entry, way: Way, model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    number = (step * 10 + micro) * 10 + rank
    generator = torch.Generator().manual_seed(number)
    torch.manual_seed(number)  # of dropout
    numpy.random.seed(number)  # of BigBird's random blocks
    return torch.stack([entry.loss(model, generator) for _ in range(way.num_calls)]).mean()


def _evaluate(entry: Entry, way: Way, model: nn.Module) -> None:
    if way.has_evaluation:
        model.eval()
        with torch.no_grad():
            _loss(entry, way, model, 99, 0, 0)
        model.train()


@dataclass(frozen=True)
class _Reference:
    """What plain torch trains.

    Attributes:
        start: parameters and buffers before.
        end: those that are saved, after.
        losses: of each rank, by micro-batch.
    """

    start: dict[str, Tensor]
    end: dict[str, Tensor]
    losses: list[list[float]]


def _plainly(entry: Entry, way: Way, world_size: int, *, is_reversed: bool = False) -> _Reference:
    """One process, the mean over what each rank would see; the buffers are those of rank 0.

    Args:
        entry, way: the cell.
        world_size: whose numbers are wanted.
        is_reversed: in the reverse order of ranks, and divide gradients rather than losses.
    """
    model = _fresh(entry, way)
    optimizer = way.plain(model)
    start = {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    buffers = [{name: value.clone() for name, value in model.named_buffers()} for _ in range(world_size)]
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(entry.num_steps):
        for micro in range(way.num_micro_batches):
            for rank in list(range(world_size))[:: -1 if is_reversed else 1]:
                _set_buffers(model, buffers[rank])
                loss = _loss(entry, way, model, step, micro, rank)
                (loss / (way.num_micro_batches * (1 if is_reversed else world_size))).backward()
                losses[rank].append(loss.item())
                buffers[rank] = {name: value.clone() for name, value in model.named_buffers()}
        for param in model.parameters() if is_reversed else ():
            if param.grad is not None:
                param.grad /= world_size
        clip = 0.1 if way.is_clipped_by_hand else way.zero.get("clip_grad")
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(world_size):
            _set_buffers(model, buffers[rank])
            _evaluate(entry, way, model)
            buffers[rank] = {name: value.clone() for name, value in model.named_buffers()}
    _set_buffers(model, buffers[0])
    saved = model.state_dict().keys()
    buffers_saved = [(name, value) for name, value in model.named_buffers() if name in saved]
    end = {name: value.detach() for name, value in (*model.named_parameters(), *buffers_saved)}
    return _Reference(start, end, losses)


@torch.no_grad()
def _set_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in values:
            buffer.copy_(values[name])


def _sharded(entry: Entry, way: Way, level: int, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    def start() -> tuple[nn.Module, Any]:
        model = _fresh(entry, way)
        zero = {"level": level, "gradient_accumulation_steps": way.num_micro_batches, **way.zero}
        if level in (0, 3):
            zero.pop("keep_gradients", None)
        return vissl_zero.initialize(model, (way.given or way.plain)(model), zero)

    model, optimizer = start()
    losses = []
    for step in range(entry.num_steps):
        for micro in range(way.num_micro_batches):
            loss = _loss(entry, way, model, step, micro, dist.get_rank())
            losses.append(loss.item())
            optimizer.backward(loss)
            if way.is_clipped_by_hand:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        _evaluate(entry, way, model)
        if step == 0 and way.is_resumed == "state":
            with torch.no_grad():
                state = copy.deepcopy(optimizer.state_dict())
            model, optimizer = start()
            optimizer.load_state_dict(state)
        if step == 0 and way.is_resumed == "folder":
            optimizer.save(folder)
            model, optimizer = start()
            optimizer.load(folder)
    return optimizer.full_state(), losses


def _run(name: str, way_name: str, levels: list[int], folder: str) -> list[tuple[str, str]]:
    """What became of each level on this rank: a word and a remark."""
    torch.set_default_dtype(torch.float64)
    try:
        entry, way = ENTRIES[name], WAYS[way_name]
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            found = [_reference(entry, way, dist.get_world_size())]
        dist.broadcast_object_list(found)
        reference, tolerance = found[0]
        return [_compared(entry, way, level, reference, tolerance, f"{folder}/{level}") for level in levels]
    finally:
        torch.set_default_dtype(torch.float32)


def _reference(entry: Entry, way: Way, world_size: int) -> tuple[_Reference, float]:
    """And how close to it a cell must be."""
    reference = _plainly(entry, way, world_size)
    moved = [
        (reference.end[key] - value).abs().max() for key, value in reference.start.items() if _is_seen(key, reference)
    ]
    assert max(moved) > 1e-6, "the model is not trained by its loss"
    noise = _distance(_plainly(entry, way, world_size, is_reversed=True), reference)
    assert noise < MOST_NOISE, f"plain torch itself differs by {noise:.0e}: nothing can be compared"
    return reference, max(TOLERANCE, NOISE_FACTOR * noise)


def _distance(other: _Reference, reference: _Reference) -> float:
    weights = max(_relative(other.end[key], value) for key, value in reference.end.items())
    return max(weights, _relative(torch.tensor(other.losses), torch.tensor(reference.losses)))


def _is_seen(key: str, reference: _Reference) -> bool:
    return key in reference.end and bool(reference.end[key].numel())


def _compared(
    entry: Entry, way: Way, level: int, reference: _Reference, tolerance: float, folder: str
) -> tuple[str, str]:
    try:
        state, found = _sharded(entry, way, level, folder)
    except vissl_zero.errors.VisslZeroError as error:
        return REFUSED, str(error)
    own = torch.tensor(reference.losses[dist.get_rank()])
    distance, where = _relative(torch.tensor(found), own), "the loss"
    if dist.get_rank() == 0:
        missing = [key for key in reference.end if key not in state]
        assert not missing, f"full_state() lacks {missing}"
        for key, value in reference.end.items():
            further = _relative(state[key], value)
            if further > distance:
                distance, where = further, key
    return (EXACT, f"{distance:.0e}") if distance <= tolerance else (DIFFERENT, f"{where} by {distance:.1e}")


def _relative(found: Tensor, expected: Tensor) -> float:
    if not expected.numel() or torch.equal(found, expected):
        return 0.0
    found, expected = found.double(), expected.double()
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1.0)).nan_to_num(nan=torch.inf).item()


# --- the sweep -------------------------------------------------------------------------------------------------------


def _cells() -> list[tuple[str, str, int]]:
    """Every model with one loop, on 2 or 3 ranks (odd ones on 1 to 3); a few models with every loop.

    Those of further libraries on 2 ranks.
    """
    cells = []
    for index, name in enumerate(ZOO):
        for world_size in (1, 2, 3) if name.startswith("odd") else (2 + index % 2,):
            cells.append((name, QUICK[(index // 2 + 5 * world_size) % len(QUICK)], world_size))
    cells += [
        (name, way, 2 + (row + column) % 2)
        for row, name in enumerate(BASE)
        for column, way in enumerate([*QUICK, "lamb"])
    ]
    cells += [("odd.blocks", f"pytorch_optimizer.{name}", 2) for name in OPTIMIZERS]
    cells += [(name, QUICK[index % len(QUICK)], 2) for index, name in enumerate(LIBRARIES)]
    return list(dict.fromkeys(cells))


CELLS = _cells()


def _outcome(name: str, way: str, world_size: int, levels: list[int]) -> dict[int, tuple[str, str]]:
    with tempfile.TemporaryDirectory(prefix="sweep_") as folder:
        try:
            of_ranks = run_on_ranks(world_size, _run, name, way, levels, folder, timeout_s=150, group_timeout_s=20)
        except RankError as error:
            if len(levels) == 1:
                return {levels[0]: (CRASH, _last_line(str(error)))}
            return {level: _outcome(name, way, world_size, [level])[level] for level in levels}
    found = {}
    for index, level in enumerate(levels):
        words = [answers[index][0] for answers in of_ranks]
        worst = max(words, key=[EXACT, REFUSED, DIFFERENT, CRASH].index)
        remark = next(answers[index][1] for answers in of_ranks if answers[index][0] == worst)
        found[level] = (
            (worst, remark) if worst != REFUSED or set(words) == {REFUSED} else (CRASH, f"some ranks: {remark}")
        )
    return found


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line and not line.startswith(" ")]
    return next((line for line in lines if "Error" in line and "RankError" not in line), lines[-1])


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_imported_once() -> None:
    """Where this module runs first: before the processes of the ranks are forked."""
    preload("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "timm")
    preload(*(library for library in map(library_of, LIBRARIES) if importlib.util.find_spec(library)))


@pytest.mark.models
@pytest.mark.timeout(700)
@pytest.mark.parametrize(("name", "way", "world_size"), CELLS)
def test_is_exact_or_refused(
    name: str, way: str, world_size: int, record_property: Callable[[str, object], None]
) -> None:
    """Refused where the zoo says so, with the sentence it says; exact elsewhere."""
    for title in (name, way):
        if title in LIBRARIES or title.startswith("pytorch_optimizer."):
            pytest.importorskip(library_of(title))
    wrong = []
    for level, (word, remark) in _outcome(name, way, world_size, [0, 1, 2, 3]).items():
        record_property("cell", (name, way, world_size, level, word, remark))
        print(f"{name:36} {way:20} {world_size} ranks  level {level}  {word:9}  {remark[:150]}", flush=True)
        sentence = ENTRIES[name].refusal(level, world_size, way) or (level and WAYS[way].refused) or None
        is_right = word == EXACT if sentence is None else word == REFUSED and sentence in remark
        if not is_right:
            wrong.append(f"level {level}: {word}: {remark}")
    assert not wrong, "\n".join(wrong)
