"""How long a step takes at a level: what is computed, plus what travels.

On this machine's CPU the recorded micro-batch and the update are run with real tensors, within limits, and timed
(``Rehearsal``). Elsewhere a roofline over the recorded operations stands for them: every kernel takes the longer of its
arithmetic and its memory traffic, at the rates of a profile (``machine_profile.py``). Small layers do not reach these
rates, so a roofline ranks plans and promises no seconds.

Messages, disk and host traffic add up and hide behind nothing. Their rates on this machine are measured in seconds and
remembered.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import multiprocessing
import os
import platform
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vissl_zero.atomic import replacing
from vissl_zero.lifetime import forked
from vissl_zero.planner.machine_profile import MachineProfile, read_profile
from vissl_zero.planner.memory_model import ModelFacts, StepMemory
from vissl_zero.planner.step_trace import Kernel, StepTrace, Work
from vissl_zero.resolve.host import free_memory
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.allocator import MAPPED_BYTES, keep_freed_blocks
from vissl_zero.sharding.engines.cpu_communicator import SLOT_BYTES, CpuCommunicator, SharedMemoryCommunicator
from vissl_zero.sharding.model.precision import dtype_of
from vissl_zero.sharding.param_facts import ParamFacts, stored_params

_MIB = 2**20
_STREAMED = 64 * _MIB  # beyond any cache of a core
# What a rank maps singly at any level, and the allocator's header in a page of its own. Without it Linux would put the
# block where huge pages fit.
_BLOCK = max(MAPPED_BYTES.values()) + mmap.PAGESIZE
_EXCHANGED = 16 * _MIB  # more than a message
# What gathering or reducing a unit takes beside its bytes, in small operations: from the steps of three networks at
# levels 1 and 3 on two ranks (docs/plan.md).
_TRANSFER_OPERATIONS = 400
_PAIR_S = 60.0  # that two processes may wait for each other
_CHAIN = 200
_NUM_MESSAGES = 10
_LAYERS = ((64, 28), (256, 7))  # channels, pixels a side


def measured_machine(device_type: str) -> MachineProfile | None:
    """What ``calibrate`` found here; None where it has not run here, or of a GPU."""
    if device_type != "cpu":
        return None
    try:
        found = json.loads(cache_file().read_text())
        return MachineProfile(**{item.name: found[item.name] for item in fields(MachineProfile)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def calibrate(folder: Path, seconds: float = 8.0) -> MachineProfile:
    """Measure this machine with one thread and remember it; rehearsals made so far are forgotten.

    Other load makes the machine look slower than it is.

    Args:
        folder: on the disk to be measured; 64 MiB are written there and removed.
        seconds: that all measurements may take together, about.
    Raises:
        OSError: the folder, or the cache, cannot be written.
    """
    share = seconds / 8
    with one_thread():
        near, reduced, message = _pair(share)  # forks: before anything else
        flops, operation = _matmul(torch.float32, share), _operation(share)
        fresh, block = _fresh(share)
        machine = MachineProfile(
            name=f"a core of {platform.node()}, measured",
            flops=flops,
            half_flops=_matmul(torch.bfloat16, share),
            memory=_stream(share),
            near_link=near,
            far_link=near / 2,
            host=_stream(0.0),
            disk=_disk(folder, share),
            operation_s=operation,
            convolution_share=_convolution(share) / flops,
            fresh=fresh,
            block_s=block,
            reduce_link=reduced,
            message_s=message,
            transfer_s=_TRANSFER_OPERATIONS * operation,
            source=f"measured on this machine, torch {torch.__version__}; far_link is assumed to be half of near_link",
        )
    target = cache_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        temporary.write_text(json.dumps(asdict(machine), indent=1))
    _times_file().unlink(missing_ok=True)
    return machine


def cache_file() -> Path:
    """Where the rates of this machine rest: another kind of processor or torch has another file."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    about = Path("/proc/cpuinfo")
    model = (
        next((line for line in about.read_text().splitlines() if "model name" in line), "") if about.exists() else ""
    )
    facts = (platform.node(), platform.machine(), model, os.cpu_count(), torch.__version__)
    return cache / "vissl_zero" / f"machine_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"


def _best(run: Callable[[], Any], seconds: float, clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds of the fastest of the runs that ``seconds`` allow, after one that does not count.

    By the processor's clock, unless ``clock`` is another: what others do in between is not counted.
    """
    run()
    end, best = time.perf_counter() + seconds, float("inf")
    while True:
        start = clock()
        run()
        # The fastest run: other load can only make one slower.
        best = min(best, clock() - start)
        if time.perf_counter() >= end:
            return best


def _matmul(dtype: torch.dtype, seconds: float) -> float:
    size = 512
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / _best(lambda: torch.mm(a, b), seconds)


def _convolution(seconds: float) -> float:
    """Of two layers of a residual network, early and late, forward and backward."""
    layers = [(torch.nn.Conv2d(c, c, 3, padding=1, bias=False), torch.ones(16, c, s, s)) for c, s in _LAYERS]

    def run() -> None:
        for layer, images in layers:
            layer(images.requires_grad_()).sum().backward()

    # Three convolutions of each: forward, and backward to weights and to images.
    flops = sum(3 * 2 * images.numel() * 9 * images.shape[1] for _, images in layers)
    return flops / _best(run, seconds)


def _stream(seconds: float) -> float:
    a, b = torch.ones(_STREAMED // 4), torch.ones(_STREAMED // 4)
    return 3 * _STREAMED / _best(lambda: a.add_(b), seconds)


def _fresh(seconds: float) -> tuple[float, float]:
    """Bytes a second that are mapped, written to and returned; and seconds that a block costs beside its bytes.

    A block of many huge pages and a small one differ: what lies before the first huge page and behind the last is
    mapped in small ones.
    """
    large, small = (_best(partial(_touch, size), seconds / 2) for size in (_STREAMED + _BLOCK, _BLOCK))
    rate = _STREAMED / max(large - small, 1e-9)
    return rate, max(0.0, small - _BLOCK / rate)


def _touch(size: int) -> None:
    """Map a block, write to each of its pages, and return it."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            fresh.madvise(mmap.MADV_HUGEPAGE)  # as ranks are started (allocator.py)
        for start in range(0, size, mmap.PAGESIZE):
            fresh[start] = 1


def _operation(seconds: float) -> float:
    """Of a small operation, forward and backward: dispatch, autograd and allocation."""
    weights = torch.ones(16, requires_grad=True)

    def run() -> None:
        x = weights
        for _ in range(_CHAIN):
            x = x * weights
        x.sum().backward()

    return _best(run, seconds) / (4 * _CHAIN)  # forward one; backward two products and a sum


def _disk(folder: Path, seconds: float) -> float:
    """Bytes a second, written until they are on the disk."""
    data = os.urandom(_MIB) * 8
    with tempfile.NamedTemporaryFile(dir=folder) as file:

        def run() -> None:
            file.seek(0)
            for _ in range(8):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())

        return 8 * len(data) / _best(run, seconds, time.perf_counter)


def _pair(seconds: float) -> tuple[float, float, float]:
    """What two processes find that exchange as ranks do: bytes a second each sends through shared memory and by an
    all-reduce of gloo's, and seconds of a small message. All in the time of their processors.
    """
    context = multiprocessing.get_context("fork")
    memories = [mmap.mmap(-1, mmap.PAGESIZE + SLOT_BYTES * 2 * CpuCommunicator.LAG) for _ in range(2)]
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_as_rank, args=(rank, memories, folder, seconds, found), daemon=True)
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(_PAIR_S)
            process.kill()  # one whose partner failed may wait for it still
        if any(process.exitcode for process in ranks) or found.empty():
            raise OSError(0, "two processes could not exchange messages", folder)
        return found.get()


def _as_rank(rank: int, memories: list[mmap.mmap], folder: str, seconds: float, found: Any) -> None:
    """One of the processes of ``_pair``; the first one says what it found. Both run everything equally often."""
    torch.set_num_threads(1)
    number = max(2, int(seconds / 0.1))
    whole = torch.ones(_EXCHANGED // 4)
    comm = SharedMemoryCommunicator(memories, [os.getppid()] * 2, rank, SLOT_BYTES, _PAIR_S)

    def exchange() -> None:
        part = whole.view(2, -1)[rank]
        comm.reduce_scatter(part, whole)
        comm.all_gather(whole, part)

    near = _EXCHANGED / _least(exchange, number, time.thread_time)
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    reduced = _EXCHANGED / _least(lambda: dist.all_reduce(whole), number, time.process_time)
    message = _message(number)
    if rank == 0:
        found.put((near, reduced, message))
    dist.barrier()
    dist.destroy_process_group()


def _message(number: int) -> float:
    """Seconds of a processor that an all-reduce of a few numbers takes between operations of some milliseconds.

    Threads sleep then, as they do in training, and must be woken: one all-reduce right after the other takes half.
    """
    small, matrix = torch.ones(64), torch.ones(512, 512)

    def spent(has_messages: bool) -> float:
        dist.barrier()
        start = time.process_time()
        for _ in range(_NUM_MESSAGES):
            torch.mm(matrix, matrix)
            if has_messages:
                dist.all_reduce(small)
        return time.process_time() - start

    found = [spent(True) - spent(False) for _ in range(number)]
    return max(0.0, statistics.median(found)) / _NUM_MESSAGES


def _least(run: Callable[[], Any], number: int, clock: Callable[[], float]) -> float:
    """Seconds of the fastest of ``number`` runs, after one that does not count."""
    found = []
    for _ in range(number + 1):
        start = clock()
        run()
        found.append(clock() - start)
    return min(found[1:])


_REHEARSED_S = 4.0  # that all rehearsals of one model may take
_DEAD_S = 60.0  # after which a rehearsal is given up, on a busy machine too
_NUM_RUNS = 5  # of each at most, after one that does not count
_SLOWER = 3.0  # than a roofline at most, on small layers: what is not begun because it would take too long
_REMEMBERED = 500  # rehearsals

T = TypeVar("T")


@dataclass(frozen=True)
class Rehearsed:
    """Seconds of what was run with real tensors; None: it was not.

    Attributes:
        micro_batch: forward and backward.
        update: of the optimizer, on the shards of a rank.
    """

    micro_batch: float | None = None
    update: float | None = None


class Rehearsal:
    """Runs parts of a step with real tensors, and says how long they take.

    Operations that are measured one by one leave out autograd, Python and the caches that neighbours share; so a whole
    micro-batch is run.

    Each is run in a process forked for it: the memory that it takes goes with that process, so do the settings of its
    allocator, and nothing that a model does with made-up values can end this one.

    What was measured is remembered on disk: a second plan of the same model costs nothing, and chooses the same.

    Args:
        num_threads: of a rank. The time is that of the processor for one, the clock's for several.

    Attributes:
        failures: a sentence for each kind that could not be run.
    """

    def __init__(self, num_threads: int):
        self._num_threads, self._left_s = num_threads, _REHEARSED_S
        self._clock = time.thread_time if num_threads == 1 else time.perf_counter
        self.failures: list[str] = []
        self._refused: set[str] = set()
        self._slower: dict[str, float] = {}  # than the roofline

    def seconds(
        self, kind: str, facts: object, expected_s: float, num_bytes: int, prepare: Callable[[], Callable[[], object]]
    ) -> float:
        """Median seconds of a run.

        Args:
            kind: what is run: one kind is slower than the roofline by about the same factor.
            facts: that tell it from all others of its kind, as they are printed.
            expected_s: by the roofline.
            num_bytes: that it takes, at most.
            prepare: gives what is run.
        Returns:
            Where it would take too long or too much memory, or fails: ``expected_s``, times what the last run of its
            kind took over its own. The first that is not run decides for all of its kind, so that they can be compared.
        """
        text = re.sub(r" at 0x[0-9a-f]+", "", repr((kind, facts, self._num_threads)))  # functions have other addresses
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        slower = self._slower.get(kind)
        found = _remembered().get(key)
        if found is None:
            # Twice at least. Half of what is free: the ranks are not there yet.
            is_long = 2 * (slower or _SLOWER) * expected_s > self._left_s
            if kind in self._refused or is_long or num_bytes > free_memory() // 2:
                self._refused |= set() if slower else {kind}
                return (slower or 1.0) * expected_s
            try:
                found, taken = forked(self._run, prepare, timeout_s=_DEAD_S)
            except Exception as error:  # noqa: BLE001 - a model may do anything with values that were made up
                self.failures.append(f"the time of the {kind}, as running it failed ({cause_of(error)})")
                self._refused.add(kind)
                return (slower or 1.0) * expected_s
            self._left_s -= taken
            _remember(key, found)
        self._slower[kind] = found / expected_s
        return found

    def _run(self, prepare: Callable[[], Callable[[], object]]) -> tuple[float, float]:
        """Median seconds of a run, and those that all took; in a process of its own."""
        begun = self._clock()
        torch.set_num_threads(self._num_threads)
        keep_freed_blocks()
        run = prepare()
        run()
        found: list[float] = []
        # A quarter: a micro-batch that is recomputed must not be left to the roofline, which has it a tenth too slow.
        until = begun + self._left_s / 4
        while len(found) < _NUM_RUNS and (not found or self._clock() + found[-1] < until):
            start = self._clock()
            run()
            found.append(self._clock() - start)
        return statistics.median(found), self._clock() - begun


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch starts no threads here: a forked process waits for ever for those that its parent had.

    Whoever forecasts with rehearsals calls this before torch computes anything in this process.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cause_of(error: Exception) -> str:
    """The type of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")


def _times_file() -> Path:
    return cache_file().with_name(cache_file().name.replace("machine_", "rehearsed_"))


def _remembered() -> dict[str, float]:
    try:
        found = json.loads(_times_file().read_text())
        return {str(key): float(value) for key, value in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(key: str, seconds: float) -> None:
    target = _times_file()
    kept = [*_remembered().items(), (key, seconds)][-_REMEMBERED:]
    with suppress(OSError):  # then it is measured again
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            temporary.write_text(json.dumps(dict(kept)))


def real_copies(modules: T) -> T:
    """Copies of modules of fake tensors, with made-up values in the place of all parameters and buffers.

    Args:
        modules: a tuple of modules, or None in the place of one.
    Raises:
        Exception: whatever a module raises that cannot be copied.
    """
    random = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for module in modules:  # type: ignore[attr-defined]
        for tensor in () if module is None else (*module.parameters(), *module.buffers()):
            if id(tensor) not in memo:
                memo[id(tensor)] = real_tensor(tensor, random)
    with warnings.catch_warnings():  # of fake tensors that are neither, such as figures that a loss has kept
        warnings.simplefilter("ignore", UserWarning)
        return deepcopy(modules, memo)


def real_tensor(fake: Tensor, random: torch.Generator) -> Tensor:
    """A tensor of the same shape, strides and dtype with values of its own; whole numbers are 0."""
    real = torch.zeros(0, dtype=fake.dtype).new_empty_strided(fake.shape, fake.stride())
    with torch.no_grad():
        if not real.is_floating_point():
            real.zero_()
        elif real.dim() < 2:  # scales and variances: no number that is close to 0
            real.uniform_(0.5, 1.5, generator=random)
        else:
            real.normal_(0.0, 0.05, generator=random)
    return nn.Parameter(real, fake.requires_grad) if isinstance(fake, nn.Parameter) else real


# Of a unit: gathered for the forward and for the backward pass, and its gradients reduced.
_TRANSFERS = 3
# A parameter that comes from a disk and returns to it, for each micro-batch, costs about as much as so many transfers.
# Measured with three small networks on two ranks (docs/plan.md).
_STREAMED_TRANSFERS = 1.5
_HALF = ("float16", "bfloat16")
_ASSUMED = {"cpu": "cpu_core", "cuda": "h100x8"}


def machine_for(device_type: str) -> MachineProfile:
    """What a plan assumes of a device where nothing says more."""
    return read_profile(_ASSUMED[device_type])


def work_seconds(work: Work, plan: ShardingPlan, machine: MachineProfile, num_threads: int = 1) -> float:
    """Estimated seconds of recorded operations, in the number formats of ``plan``."""
    is_half = plan.precision.autocast is not None or plan.precision.compute in _HALF
    flops = (machine.half_flops if is_half else machine.flops) * num_threads
    rates = {Kernel.CONVOLUTION: flops * machine.convolution_share}
    seconds = work.seconds(lambda kernel: rates.get(kernel, flops), machine.memory)
    return seconds + work.num_operations * machine.operation_s


def _messages(params: Mapping[str, ParamFacts], share: float) -> float:
    """Bytes of all parameters as level 3 sends them; ``share``: of those in the master format."""
    return sum(param.sent(1, share) for param in params.values())


def step_seconds(
    trace: StepTrace,
    facts: ModelFacts,
    plan: ShardingPlan,
    world_size: int,
    num_nodes: int,
    micro_batches: int,
    machine: MachineProfile,
    device_type: str,
    memory: StepMemory | None = None,
    num_threads: int = 1,
    rehearsed: Rehearsed = Rehearsed(),
) -> float:
    """Estimated seconds of one step of a rank.

    Args:
        trace, facts: as for ``step_memory``.
        plan: level and tiers.
        world_size, num_nodes: ranks and machines.
        micro_batches: per step.
        machine: its rates.
        device_type: "cpu" or "cuda": on the CPU the tier ``cpu`` is where state is anyway.
        memory: of the same step; None where it is not known.
        num_threads: of a rank, on the CPU: they share the arithmetic.
        rehearsed: what was measured, in the place of the roofline.
    """
    num_ranks = plan.ranks_per_copy(world_size)
    compute = rehearsed.micro_batch
    if compute is None:
        compute = work_seconds(trace.work, plan, machine, num_threads)
    share = dtype_of(plan.precision.compute).itemsize / dtype_of(plan.precision.master).itemsize
    params = sum(param.num_bytes for param in facts.params.values())
    grads = sum(param.num_bytes for param in facts.params.values() if param.is_trained)
    taught = sum(param.num_bytes for param in facts.teacher.values())
    part = grads / num_ranks
    state = facts.updates[num_ranks].state_bytes
    link = machine.near_link if num_nodes == 1 else machine.far_link
    group_link = machine.near_link if num_ranks <= world_size // num_nodes else machine.far_link
    cut = (num_ranks - 1) / num_ranks
    if plan.level == 0:
        # A ring all-reduce sends (N-1)/N of the gradients twice: to sum them, and to tell the sums.
        ring = machine.reduce_link if machine.reduce_link and num_nodes == 1 else link
        sent = 2 * (world_size - 1) / world_size * grads / ring
    else:
        rounds = micro_batches if plan.level >= 2 else 1
        # Level 3 gathers before each forward and each backward pass; levels 1 and 2 once a step.
        gathers = 2 * micro_batches if plan.level == 3 else 1
        messages = _messages(facts.params, share) if plan.level == 3 else params * share
        sent = cut * (rounds * grads + gathers * messages) / group_link
        if plan.level == 3:
            sent += cut * micro_batches * _messages(facts.teacher, share) / group_link
            # Between parameters and messages all is copied once more: read and written.
            sent += 2 * (rounds * grads + (gathers * params + micro_batches * taught) * share) / machine.memory
        replicas = world_size // num_ranks
        sent += 2 * (replicas - 1) / replicas * part / link
    # The update reads and writes state and parameters, and reads gradients.
    moved = 2 * state + 2 * params / num_ranks + part
    update = moved / machine.memory if rehearsed.update is None else rehearsed.update
    optimizer_place, params_place = (tier.place(device_type) for tier in (plan.offload_optimizer, plan.offload_params))
    if optimizer_place == "disk":
        update += 2 * state / machine.disk
    elif optimizer_place == "host":
        update += moved / machine.host
    if params_place == "disk":
        own = stored_params(facts.params, plan, num_ranks).values()
        values = sum(param.num_bytes for param in own) / num_ranks
        trained = sum(param.num_bytes for param in own if param.is_trained) / num_ranks
        follows = sum(param.num_bytes for param in stored_params(facts.teacher, plan, num_ranks).values()) / num_ranks
        # Parameters are read for each pass, read and written by the update; gradients are read and written per
        # micro-batch.
        update += (2 * micro_batches * values + 2 * values + 2 * micro_batches * trained) / machine.disk
        # A teacher's are read for each pass; to follow, they are read and written, and those of the model are read.
        update += (micro_batches + 3) * follows / machine.disk
    elif params_place == "host":
        update += (2 * micro_batches * params / num_ranks + part) / machine.host
        update += micro_batches * taught / num_ranks / machine.host
    per_micro_batch = compute + _overhead_seconds(trace, facts, plan, world_size, machine, memory)
    return micro_batches * per_micro_batch + sent + update


def _overhead_seconds(
    trace: StepTrace,
    facts: ModelFacts,
    plan: ShardingPlan,
    world_size: int,
    machine: MachineProfile,
    memory: StepMemory | None,
) -> float:
    """Of a micro-batch, what neither computes nor depends on how much is sent: fresh memory, messages, bookkeeping."""
    seconds = 0.0
    if memory is not None and machine.fresh is not None:
        seconds += memory.cleared_bytes / machine.fresh + memory.num_mapped * machine.block_s
    if world_size > 1:
        seconds += trace.work.num_messages * machine.message_s
    if plan.level == 3:
        units, taught = ({param.unit for param in params.values()} for params in (facts.params, facts.teacher))
        transfers: float = _TRANSFERS * len(units) + len(taught)
        num_ranks = plan.ranks_per_copy(world_size)
        stored = sum(len(stored_params(params, plan, num_ranks)) for params in (facts.params, facts.teacher))
        transfers += _STREAMED_TRANSFERS * stored
        seconds += transfers * machine.transfer_s
    return seconds
