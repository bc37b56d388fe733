"""A run and its checkpoints: where it resumes, and the hooks that save it."""

from __future__ import annotations

from collections.abc import Sequence

import rich

from vissl_zero.atomic import read_object
from vissl_zero.checkpoint.replicated import RankCheck
from vissl_zero.checkpoint.resume import opening_lines, resume
from vissl_zero.checkpoint.saver import CheckpointHook, Saver
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.reporting import summary


def with_checkpoints(run: Run, hooks: Sequence[Hook]) -> list[Hook] | None:
    """Restore ``run`` from its newest checkpoint, if it has one and may resume; returns the hooks to train with.

    Collective. Returns None if the run is complete and has written its summary.

    Raises:
        CheckpointError, ConfigError: see ``resume``.
    """
    options = run.plan.config["CHECKPOINT"]
    saver = Saver(run.folder, options["ASYNC"], options["KEEP_LAST"], options["KEEP_EVERY"], run.device)
    if options["AUTO_RESUME"]:
        found = resume(run, hooks, run.plan)
        if found.path is not None:
            saver.latest_step = run.step
        if run.is_main:
            for line in opening_lines(found, run.plan):
                _say(line)
    if run.is_resumed and run.step >= run.num_steps and _is_over(run):
        if run.is_main:
            _say(f"The run in {run.folder} is complete (step {run.step} of {run.num_steps}); nothing is left to do.")
        saver.close()
        return None
    if options["CHECK_RANKS_EVERY"] > 0:
        hooks = [*hooks, RankCheck(options["CHECK_RANKS_EVERY"])]
    hook = CheckpointHook(saver, hooks, options["CHECKPOINT_FREQUENCY"], options["CHECKPOINT_ITER_FREQUENCY"])
    return [*hooks, hook]


def _is_over(run: Run) -> bool:
    """Whether the summary of the run's last step exists. The same on every rank, because they share the folder."""
    try:
        return read_object(run.folder / summary.FILE_NAME).get("num_steps") == run.step
    except (OSError, ValueError):
        return False


def _say(line: str) -> None:
    rich.get_console().print(line, markup=False, highlight=False, soft_wrap=True)
