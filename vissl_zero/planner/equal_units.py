"""Equal units one after another are recorded at both ends of their run; what lies between is copied from there.

A trunk of 40 equal blocks is recorded with four: the units between hand on what they are given. In the recording, each
unit's stretch of the forward and of the backward pass is then repeated for every unit that was passed over. This is
checked, not assumed: the inner two of the four must have left the same stretches, and a copy must free what it
allocates. Where that does not hold (a tapped block, a model that runs twice), nothing is made of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from vissl_zero.models.model import Unit
from vissl_zero.planner.step_trace import Mark, Moment, Recorder, StepTrace, Work, record_step
from vissl_zero.sharding.model.wrap_plan import WrapPlan

_FEWEST = 6  # with fewer, next to nothing is passed over
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STUDENT, _TEACHER = (Moment.FORWARD_IN, Moment.BACKWARD_IN), (Moment.TEACHER_IN,)


@dataclass(frozen=True)
class UnitRun:
    """Equal units, each of which is given what the one before it gave.

    Attributes:
        names: of all of them, in forward order.
        entries: the moments at which a unit's stretches begin.
    """

    names: tuple[str, ...]
    entries: tuple[Moment, ...]

    @property
    def passed(self) -> tuple[str, ...]:
        """Those that are not recorded."""
        return self.names[2:-2]

    @property
    def recorded(self) -> tuple[str, ...]:
        """The two at each end."""
        return (*self.names[:2], *self.names[-2:])


def recorded(
    model: nn.Module,
    wrap_plan: WrapPlan,
    run_forward: Callable[[], tuple[Tensor, Any]],
    inputs: Sequence[Tensor],
    teacher: nn.Module | None = None,
    others: Sequence[Tensor] = (),
) -> StepTrace:
    """The trace of one micro-batch; arguments as for ``record_step``."""
    models = [(model, False), *([] if teacher is None else [(teacher, True)])]
    runs = [(part, run) for part, is_teacher in models for run in _runs_of(part, wrap_plan, is_teacher)]
    passed = {part.get_submodule(name) for part, run in runs for name in run.passed}

    if passed:
        try:
            with _passed_over(passed):
                recorder = record_step(model, wrap_plan, run_forward, inputs, teacher, others, passed)
            return _Completion(recorder).fill([run for _, run in runs])
        except _UnevenError:
            pass
    return record_step(model, wrap_plan, run_forward, inputs, teacher, others).trace


def _runs_of(model: nn.Module, wrap_plan: WrapPlan, is_teacher: bool) -> list[UnitRun]:
    """The runs of ``model`` that are long enough.

    Args:
        model: the trained model, or the teacher, which may have fewer units.
        wrap_plan: of the trained model at level 3.
        is_teacher: which of the two it is.
    """
    names = {module: name for name, module in model.named_modules()}
    known = {unit.modules[0] for unit in wrap_plan.units if len(unit.modules) == 1}
    found = []
    for container in model.modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        first: nn.Module | None = None
        number = 0
        keys = []
        for child in container:
            is_next = (
                first is not None and names[child] in known and _is_alike(first, names[first], child, names[child])
            )
            if not is_next:
                first, number = child, number + 1
            keys.append((number, names[child]))
        for _, group in groupby(keys, key=lambda key: key[0]):
            run = UnitRun(tuple(name for _, name in group), _TEACHER if is_teacher else _STUDENT)
            if len(run.names) >= _FEWEST and run.names[0] in known:
                found.append(run)
    return found


def _is_alike(a: nn.Module, name: str, b: nn.Module, other: str) -> bool:
    """Whether two units do the same to what they are given, as far as memory goes."""
    is_plain = all(isinstance(unit, Unit) and type(unit).forward is Unit.forward for unit in (a, b))
    return is_plain and [*_facts(a, name)] == [*_facts(b, other)]


def _facts(unit: nn.Module, name: str) -> Iterator[Any]:
    for path, module in unit.named_modules():
        yield path, type(module)
        for key, value in vars(module).items():
            if key in _HOOKS and value:
                yield object()  # a hook may keep anything: like no other
            elif key not in ("_modules", *_HOOKS):
                yield key, _fact(value, name)


def _fact(value: Any, name: str) -> Any:
    """What of an attribute decides what is allocated: of a number that is not whole, whether it is 0."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, float):
        return bool(value)
    if isinstance(value, str):
        return value.replace(name, "")
    if isinstance(value, dict):
        return [(key, _fact(item, name)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_fact(item, name) for item in value]
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, nn.Module):
        return type(value), _fact(vars(value), name)
    return value


@contextmanager
def _passed_over(units: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, these units hand on what they are given.

    So whoever keeps what one of them gives keeps what a recorded one gave, whose stretch shows it.
    """
    changed = [*units]
    for unit in changed:
        unit.forward = _hand_on
    try:
        yield
    finally:
        for unit in changed:
            del unit.forward


def _hand_on(xs: list[Tensor]) -> list[Tensor]:
    return xs


class _UnevenError(Exception):
    """The recorded units of a run are not each other's copies."""


@dataclass(frozen=True)
class _Stretch:
    """Marks ``begin`` to ``end`` (not included) and the deltas between them, of one unit of a run."""

    begin: int
    end: int
    position: int  # of the unit among the recorded ones


class _Completion:
    def __init__(self, recorder: Recorder):
        self.trace, self.births, self.works = recorder.trace, recorder.births, recorder.works
        self.insertions: dict[int, list[tuple[_Stretch, dict[str, str]]]] = {}  # before this mark
        self.renamed: dict[int, str] = {}
        self.repeated: dict[int, int] = {}  # deltas -> how often more
        self.more = Work()
        self.forward_work = dict(recorder.trace.forward_work)

    def fill(self, runs: Sequence[UnitRun]) -> StepTrace:
        for run in runs:
            self.prepare(run)
        return self.built()

    def prepare(self, run: UnitRun) -> None:
        """Decide what one run inserts."""
        number = len(run.passed)
        if run.recorded[1] in self.forward_work:  # a teacher's is not kept
            self.forward_work |= dict.fromkeys(run.passed, self.forward_work[run.recorded[1]])
        templates, zones = [], []
        for entry in run.entries:
            is_backward = entry == Moment.BACKWARD_IN
            order = (3, 2, 1, 0) if is_backward else (0, 1, 2, 3)
            begins = [self.place_of(entry, run.recorded[position]) for position in order]
            if begins != sorted(begins):
                raise _UnevenError
            # The inner two: the outer two also hold what ties the run to the layers before and behind it.
            first, second = (_Stretch(begins[i], begins[i + 1], order[i]) for i in (1, 2))
            if self.shape(first, run) != self.shape(second, run):
                raise _UnevenError
            templates.append(first)
            # Between the two inner units. Backward, the stretch of a unit may hold the end of the one behind it.
            copies = range(len(run.names) - 3, 1, -1) if is_backward else range(2, len(run.names) - 2)
            step = -1 if is_backward else 0
            self.insertions.setdefault(second.begin, []).extend(
                (
                    first,
                    {
                        run.recorded[first.position]: run.names[index],
                        **({run.recorded[first.position + 1]: run.names[index - step]} if step else {}),
                    },
                )
                for index in copies
            )
            if is_backward:
                behind = {run.recorded[second.position + 1]: run.names[2]}
                for index in range(second.begin, second.end):
                    self.renamed[index] = _renamed(self.trace.marks[index].name, behind)
            until = len(self.trace.marks) if is_backward else self.place_of(Moment.LOSS, "")
            last = [
                mark for mark in self.trace.marks[begins[0] : until] if _is_within(mark.name, run.recorded[order[3]])
            ]
            zones.append(range(self.trace.marks[begins[0]].place, last[-1].place))
        made = [self.deltas_of(template) for template in templates]
        left = sum(sum(self.trace.deltas[place] for place in places) for places in made)
        for place, birth in enumerate(self.births):  # what all units free together: autocast's copies of weights
            is_theirs = any(birth in places for places in made)
            # A delta whose birth is its own place makes a storage; all others free one.
            if is_theirs and place != birth and not any(place in zone for zone in zones):
                self.repeated[place] = number
                left += self.trace.deltas[place]
        if left:
            raise _UnevenError
        for template in templates:
            own = self.works[template.end].plus(self.works[template.begin], -1)
            self.more = self.more.plus(own, number)

    def place_of(self, moment: Moment, name: str) -> int:
        """Index of the one mark of this kind."""
        found = [i for i, mark in enumerate(self.trace.marks) if mark.moment == moment and mark.name == name]
        if len(found) != 1:
            raise _UnevenError
        return found[0]

    def deltas_of(self, stretch: _Stretch) -> range:
        return range(self.trace.marks[stretch.begin].place, self.trace.marks[stretch.end].place)

    def shape(self, stretch: _Stretch, run: UnitRun) -> tuple[list[list[int]], list[tuple[int, Moment, int, str, int]]]:
        """What a stretch does, seen from its unit."""
        places = self.deltas_of(stretch)
        marks = []
        for mark in self.trace.marks[stretch.begin : stretch.end]:
            owner = next((i for i, name in enumerate(run.recorded) if _is_within(mark.name, name)), None)
            if owner is None:
                raise _UnevenError
            rest = mark.name.removeprefix(run.recorded[owner])
            marks.append((mark.place - places.start, mark.moment, owner - stretch.position, rest, mark.num_bytes))
        cuts = {place for place, *_ in marks}
        deltas: list[list[int]] = []
        for place, delta in enumerate(self.trace.deltas[places.start : places.stop]):
            if delta > 0 or place in cuts or not deltas or deltas[-1][0] > 0:
                deltas.append([])
            deltas[-1].append(delta)
        return [sorted(group) for group in deltas], marks  # what goes at once goes in any order

    def built(self) -> StepTrace:
        """The recording with everything inserted."""
        old, deltas, marks = self.trace, list[int](), list[Mark]()
        done = 0
        for index, mark in enumerate([*old.marks, Mark(len(old.deltas), Moment.LOSS)]):
            for place in range(done, mark.place):
                deltas += [old.deltas[place]] * (1 + self.repeated.get(place, 0))
            done = mark.place
            for stretch, names in self.insertions.get(index, ()):
                places = self.deltas_of(stretch)
                for copied in old.marks[stretch.begin : stretch.end]:
                    place = copied.place - places.start + len(deltas)
                    marks.append(replace(copied, place=place, name=_renamed(copied.name, names)))
                deltas += old.deltas[places.start : places.stop]
            marks.append(replace(mark, place=len(deltas), name=self.renamed.get(index, mark.name)))
        marks.pop()  # the end
        loss = next(mark.place for mark in marks if mark.moment == Moment.LOSS)
        return replace(
            old,
            deltas=deltas,
            marks=marks,
            work=old.work.plus(self.more),
            kept_bytes=sum(deltas[:loss]),
            forward_work=self.forward_work,
        )


def _is_within(name: str, unit: str) -> bool:
    return name == unit or name.startswith(f"{unit}.")


def _renamed(name: str, names: dict[str, str]) -> str:
    for unit, other in names.items():
        if _is_within(name, unit):
            return other + name.removeprefix(unit)
    return name
