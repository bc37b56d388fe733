"""The answer to "out of memory": what the bytes are, and the cheapest switch that would help.

Estimates come from the same formulas as the memory tables (ZeRO paper, arXiv 1910.02054): with N ranks per shard group,
level 1 keeps 1/N of the optimizer state, level 2 of the gradients too, level 3 of the parameters too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vissl_zero.config.resolved import OptimizerPlan, ResolvedRun
from vissl_zero.errors import OutOfMemoryError
from vissl_zero.reporting.quantity import bytes_text, shown_kinds, total
from vissl_zero.sharding.strategy import Bytes

# Share of the activations that goes away, at least. Measured on the CPU with RegNets of 45 k and 3.9 M parameters:
# recomputing keeps 13 to 17 % (and, for a moment, those of the block being recomputed); autocast saves 29 and 44 %.
_SAVED_BY_RECOMPUTING = 0.7
_SAVED_BY_BFLOAT16 = 0.3
_WORTHWHILE = 0.1  # of all that is held; less than this is not worth a switch
_STATES_PER_PARAMETER = {"sgd": 1, "lars": 1, "adam": 2, "adamw": 2}
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Switch:
    """One change to the command line that frees memory.

    Attributes:
        override: what to add, as the user types it.
        saved: estimated bytes per rank.
        price: what it costs, in words.
    """

    override: str
    saved: int
    price: str

    def __str__(self) -> str:
        return f"{self.override}  saves about {bytes_text(self.saved)} per rank; {self.price}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed: CUDA's, the CPU allocator's, or Python's own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def explain(error: BaseException, plan: ResolvedRun, ledger: Bytes | None) -> OutOfMemoryError:
    """The error to raise instead: bytes by kind, the cheapest switch that would help, and the others.

    Args:
        error: see ``is_out_of_memory``.
        plan: the run.
        ledger: this rank's memory by kind, or None if the model was not built yet.
    """
    requested = requested_bytes(error)
    failed = f"an allocation of {bytes_text(requested)} failed" if requested else "an allocation failed"
    if ledger is None or total(ledger) == 0:
        return OutOfMemoryError(
            f"Out of memory while the model was being built: {failed}. A smaller model, fewer processes on this "
            f"machine (config.DISTRIBUTED.NUM_PROC_PER_NODE, now {plan.procs_per_node}) or a machine with more memory "
            "would help."
        )
    held = ", ".join(f"{name} {bytes_text(getattr(ledger, kind))}" for kind, name in shown_kinds(ledger).items())
    lines = [f"Out of memory: {failed} while this rank held {bytes_text(total(ledger))} ({held})."]
    return OutOfMemoryError("\n".join([*lines, *_advice(list(switches(plan, ledger)), ledger, requested)]))


def _advice(known: list[Switch], ledger: Bytes, requested: int | None) -> list[str]:
    need = max(requested or 0, int(_WORTHWHILE * total(ledger)))
    best = next((switch for switch in known if switch.saved >= need), None)
    if best is not None:
        others = [switch for switch in known if switch is not best and switch.saved >= need // 2]
        return ["The cheapest switch that would help:", f"  {best}", *_listed("Others:", others)]
    useful = sorted((switch for switch in known if switch.saved > 0), key=lambda switch: -switch.saved)
    if not useful:
        return ["No switch would free much here: use a smaller model or batch, or more memory."]
    return [*_listed("No single switch frees enough; these together free the most:", useful)]


def _listed(title: str, found: list[Switch]) -> list[str]:
    return [title, *(f"  {switch}" for switch in found)] if found else []


def requested_bytes(error: BaseException) -> int | None:
    """Size of the allocation that failed, if the message has it."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", str(error))
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def switches(plan: ResolvedRun, ledger: Bytes) -> Iterator[Switch]:
    """Every switch that would free memory in this run, the cheapest for the user first.

    First those that leave every number as it is (levels, in order of communication; then recomputing), then those that
    change what is computed.
    """
    yield from _levels(plan, ledger)
    sharding = plan.sharding
    if not sharding.checkpoint_every and not sharding.stage_checkpoints:
        yield Switch(
            "config.MODEL.ACTIVATION_CHECKPOINTING.USE_ACTIVATION_CHECKPOINTING=True",
            int(_SAVED_BY_RECOMPUTING * ledger.activations),
            "same numbers, about a third more time",
        )
    if plan.batch_per_rank > 1:
        yield _smaller_micro_batch(plan, ledger)
    precision = sharding.precision
    if precision.master == "float64":
        saved = (total(ledger) - ledger.buffers) // 2
        yield Switch("config.TRAINER.DTYPE=float32", saved, "float32 rounding")
    elif precision.autocast is None and precision.compute == "float32":
        yield Switch(
            "config.MODEL.AMP_PARAMS.USE_AMP=True config.MODEL.AMP_PARAMS.DTYPE=bfloat16",
            int(_SAVED_BY_BFLOAT16 * ledger.activations),
            "computes in bfloat16",
        )


def _smaller_micro_batch(plan: ResolvedRun, ledger: Bytes) -> Switch:
    half, twice = plan.batch_per_rank // 2, plan.accumulation_steps * 2
    even = plan.batch_per_rank % 2 == 0
    batch = "the same global batch" if even else f"a global batch of {half * twice * plan.world_size}"
    return Switch(
        f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={half} config.ZERO.gradient_accumulation_steps={twice}",
        ledger.activations * (plan.batch_per_rank - half) // plan.batch_per_rank,
        f"{batch}, but batch norm and assignments see half the images at a time",
    )


def _levels(plan: ResolvedRun, ledger: Bytes) -> Iterator[Switch]:
    whole = whole_state(ledger, plan)
    now = state_bytes(whole, plan.sharding.level, plan.sharding.shard_group_size)
    prices = {1: "no more communication", 2: "no more communication", 3: "1.5 times the communication"}
    for level in range(plan.sharding.level + 1, 4):
        saved = now - state_bytes(whole, level, plan.sharding.shard_group_size)
        if saved > 0:
            yield Switch(f"config.ZERO.LEVEL={level}", saved, f"same numbers, {prices[level]}")


def whole_state(ledger: Bytes, plan: ResolvedRun) -> Bytes:
    """Unsharded parameters, gradients and optimizer state, from what one rank holds of them.

    What the run had not yet allocated when it stopped (gradients before the first backward, optimizer state before the
    first step) is counted as it would have been.
    """
    level, ranks = plan.sharding.level, plan.sharding.shard_group_size
    params = ledger.params * (ranks if level >= 3 else 1)
    grads = ledger.grads * (ranks if level >= 2 else 1)
    optimizer = ledger.optimizer * (ranks if level >= 1 else 1)
    return Bytes(
        params=params,
        grads=grads or params,
        optimizer=optimizer or params * _states_per_parameter(plan.optimizer),
    )


def _states_per_parameter(optimizer: OptimizerPlan) -> int:
    if optimizer.name == "sgd" and not optimizer.options.get("momentum"):
        return 0
    return _STATES_PER_PARAMETER.get(optimizer.name, 0)


def state_bytes(whole: Bytes, level: int, num_ranks: int) -> int:
    """Bytes of state one rank of ``num_ranks`` holds at a level."""

    def share(num_bytes: int, first_level: int) -> int:
        return num_bytes // num_ranks if level >= first_level else num_bytes

    return share(whole.params, 3) + share(whole.grads, 2) + share(whole.optimizer, 1)
