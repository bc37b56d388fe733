"""The launcher of this machine's ranks: it starts, watches and restarts them, alone or together with other machines.

The ranks of one machine meet through files in a folder that only this user can enter. torch's TCPStore listens on every
interface, even with the address 127.0.0.1, so anyone who reaches the machine could join or disturb a run. If a rank is
lost, all ranks are restarted from the newest checkpoint.

Each of several machines has its own launcher, started by hand, one command per machine, or by a batch system.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from vissl_zero.engine import stopping
from vissl_zero.errors import LaunchError
from vissl_zero.launch.failure import Failure, first_failure
from vissl_zero.launch.key_value_store import load_secret
from vissl_zero.launch.rank_group import RankGroup
from vissl_zero.launch.rendezvous import CRASHED, LauncherSpec, Rendezvous
from vissl_zero.launch.run_folder import prepare_folder
from vissl_zero.lifetime import Scratch, run_in_subprocess
from vissl_zero.planner.fit_plans import FitRun
from vissl_zero.resolve.host import RESERVE, num_oom_kills, require_interfaces, settled_free_memory
from vissl_zero.resolve.resolve import save_resolved
from vissl_zero.resolve.resolved import ResolvedRun, with_fewer_ranks
from vissl_zero.sharding.allocator import allocator_environment, gpu_allocator_environment
from vissl_zero.version import __version__

_NOT_FAILED = {0, stopping.STOPPED, stopping.INTERRUPTED}


def launch_local(  # noqa: C901
    plan: ResolvedRun,
    rendezvous: Rendezvous | None = None,
    plan_folder: Path | None = None,
    began: float | None = None,
    fit: FitRun | None = None,
    work: str = "worker",
) -> int:
    """Start this machine's ranks and wait for them; restart them at most ``DISTRIBUTED.MAX_RESTARTS`` times.

    Args:
        plan: plan of the run.
        rendezvous: joined rendezvous, if other machines (or other launchers here) take part. Then only
            ``launch_member`` restarts ranks, on all machines together.
        plan_folder: folder with ``config.resolved.yaml``; None: the run folder.
        began: start of the time limit, as Unix time; None: now.
        fit: fit that chose ``plan``, and chooses another plan if memory runs out. Not with ``rendezvous``.
        work: module of ``launch`` whose ``main`` the ranks run.
    Returns:
        Exit code: 0, 75 (saved and stopped on request), 130 (saved and stopped by Ctrl-C), 2 (a user's error, whose
        sentence was printed) or 1 (a crash, whose traceback was printed).
    """
    most_restarts = 0 if rendezvous else plan.config.DISTRIBUTED.MAX_RESTARTS
    num_procs = rendezvous.spec.procs if rendezvous else plan.procs_per_node
    num_restarts = 0
    began = began or time.time()
    environment = _environment(plan, rendezvous, began)
    if fit:
        fit.started()
    while True:
        # The counter is the machine's: only kills while the ranks run may be theirs.
        num_kills = num_oom_kills()
        # New in every attempt: torch's file store would still have the addresses of earlier ranks.
        with Scratch() as private:
            first_rank = rendezvous.first_rank() if rendezvous else 0
            folder = str(plan_folder or plan.run_dir)
            group = RankGroup(num_procs, first_rank, folder, private, _log_folder(plan), environment, work)
            if rendezvous:
                rendezvous.watch_over(group.end)
            try:
                codes = group.wait()
            finally:
                group.kill()
            bad = {rank: code for rank, code in codes.items() if code not in _NOT_FAILED}
            # A rank that ended before it handled signals had nothing to save.
            is_early = any(-code in stopping.SIGNALS for code in bad.values())
            if group.asked is not None and (not bad or is_early or group.was_killed_by_user):
                return _stopped(plan, group.asked, codes, num_procs)
            if not bad and len(codes) == num_procs:
                return max(codes.values())
            failure = first_failure(private, bad, is_short_of_memory=num_oom_kills() > num_kills)
        if rendezvous and (cause := rendezvous.explain(failure)):
            print(f"{cause}\nThe run folder is {plan.run_dir}", file=sys.stderr)
            return rendezvous.exit_code
        if failure.is_out_of_memory and fit and group.asked is None:
            fit.ran_out()
            if num_restarts < most_restarts and (reason := fit.go_on(_free_for_a_rank(plan))):
                num_restarts += 1
                plan = _next_choice(fit, reason, failure, num_restarts, most_restarts)
                num_procs, environment = plan.procs_per_node, _environment(plan, rendezvous, began)
                continue
        if failure.is_user_error:
            print(failure.text, file=sys.stderr)
            return 2
        if group.asked is not None:
            stopping.request_stop(group.asked.reason, group.asked.exit_code)
            _explain(failure, plan)
            print(f"It was asked to stop ({group.asked.reason}) and could no longer save.", file=sys.stderr)
            return 1
        if num_restarts >= most_restarts:
            _explain(failure, plan)
            return 1
        num_restarts += 1
        plan = _restarted(plan, failure, num_restarts)
        num_procs = plan.procs_per_node


def _next_choice(fit: FitRun, reason: str, failure: Failure, num_restarts: int, most_restarts: int) -> ResolvedRun:
    """Print and log that the run continues with the next choice of ``fit``. Return its plan."""
    restart = f"restart {num_restarts} of at most {most_restarts}"
    print(f"{failure.text.rstrip()}\n{reason} ({restart}).", file=sys.stderr, flush=True)
    save_resolved(fit.choice.run, fit.folder / "config.resolved.yaml")
    fit.started()
    return fit.choice.run


def _free_for_a_rank(plan: ResolvedRun) -> int:
    """Measure the free bytes of a rank's device. Call it after the earlier ranks have ended."""
    if plan.device == "cuda":
        try:
            return run_in_subprocess(_free_gpu_memory, plan.procs_per_node)
        except Exception as error:  # noqa: BLE001 - the earlier failure suffices to continue
            print(f"The free memory of the GPUs could not be measured ({error}).", file=sys.stderr)
            return sys.maxsize
    return max(0, settled_free_memory() // plan.procs_per_node - RESERVE)


def _free_gpu_memory(num_gpus: int) -> int:
    """Measure the free bytes of the fullest GPU; the context of this process stands for that of the rank."""
    import torch

    return min(torch.cuda.mem_get_info(index)[0] for index in range(num_gpus))


def _restarted(plan: ResolvedRun, failure: Failure, num_restarts: int) -> ResolvedRun:
    """Announce a restart and return the plan of the restarted run."""
    least, most = plan.config.DISTRIBUTED.MIN_PROC_PER_NODE, plan.config.DISTRIBUTED.MAX_RESTARTS
    fewer = with_fewer_ranks(plan, least) if least > 0 else None
    cause = failure.text.rstrip()
    ranks = "" if fewer is None else f" with {fewer.procs_per_node} of {plan.procs_per_node} processes"
    print(f"{cause}\nRestarting{ranks} (restart {num_restarts} of at most {most}).", file=sys.stderr, flush=True)
    if fewer is None:
        return plan
    save_resolved(fewer, Path(fewer.run_dir) / "config.resolved.yaml")
    return fewer


def _stopped(plan: ResolvedRun, stop: stopping.Stop, codes: dict[int, int], num_procs: int) -> int:
    """Return the exit code of a run that stopped on request: complete, saved, or unsaved (second Ctrl-C, too early)."""
    # The request is for this process too, which could start further runs.
    stopping.request_stop(stop.reason, stop.exit_code)
    if len(codes) == num_procs and set(codes.values()) == {0}:
        return 0
    print(f"\nStopped; all ranks have ended. The run folder is {plan.run_dir}", file=sys.stderr)
    return stop.exit_code


def _explain(failure: Failure, plan: ResolvedRun) -> None:
    print(failure.text, file=sys.stderr)
    where = f"rank {failure.rank} failed first; the run folder is {plan.run_dir}"
    print(f"\n{where}\nOutput of ranks other than 0: {_log_folder(plan)}", file=sys.stderr)


def _log_folder(plan: ResolvedRun) -> Path:
    return Path(plan.run_dir) / "logs"


def _environment(plan: ResolvedRun, rendezvous: Rendezvous | None, began: float) -> dict[str, str]:
    """Return the environment that the ranks inherit."""
    environment = dict(os.environ)
    require_interfaces(environment)
    environment["OMP_NUM_THREADS"] = str(plan.threads_per_rank)
    if rendezvous is not None:
        environment |= rendezvous.variables()
    elif "GLOO_SOCKET_IFNAME" not in environment and Path("/sys/class/net/lo").exists():
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # gloo's own sockets: this machine only
    of_device = allocator_environment if plan.device == "cpu" else gpu_allocator_environment
    environment |= of_device(plan.sharding, environment)
    limit = plan.config.CHECKPOINT.TIME_LIMIT_MIN
    if limit is not None:  # it counts all restarts
        stopping.end_at(began + 60 * limit)
        environment[stopping.END_AT_VARIABLE] = str(stopping.deadline())
        # The limit is for the ranks: here it would be a request to this process, which could start further runs.
        stopping.forget()
    return environment


def launch_machine(plan: ResolvedRun, user_yaml: str, node_id: int) -> int:
    """Start this machine's ranks of a run whose machines meet at ``DISTRIBUTED.RUN_ID``. Return the exit code.

    Raises:
        LaunchError: the machines do not find or accept each other, or the run folder cannot be used.
    """
    distributed = plan.config.DISTRIBUTED
    host, _, port = distributed.RUN_ID.rpartition(":")
    spec = LauncherSpec(
        index=node_id,
        count=plan.num_nodes,
        procs=plan.procs_per_node,
        address=(host.strip("[]"), int(port)),
        secret=load_secret(distributed.SECRET_FILE),
        timeout_s=plan.sharding.timeout_s,
    )
    with prepare_folder(plan, user_yaml) if node_id == 0 else nullcontext():
        return launch_member(plan, spec)


def launch_member(plan: ResolvedRun, spec: LauncherSpec, announce: Path | None = None) -> int:
    """Join, start the ranks and wait for them; restart at most ``DISTRIBUTED.MAX_RESTARTS`` times if one is lost.

    Args:
        plan: plan of the run.
        spec: specification of this launcher.
        announce: file to which launcher 0 writes its address.
    Returns:
        Exit code; see ``launch_local``.
    Raises:
        LaunchError: the machines do not find or accept each other.
    """
    most, began = plan.config.DISTRIBUTED.MAX_RESTARTS, time.time()
    before: Rendezvous | None = None
    while True:
        rendezvous = Rendezvous(spec, announce, before)
        code: int | None = 2
        try:
            code = _generation(plan, rendezvous, began)
            may_start_again = rendezvous.may_start_again and stopping.requested_stop() is None
            if code == CRASHED and may_start_again and rendezvous.num_restarts < most:
                code = None
        except LaunchError as error:
            # At a restart, machine 0 may be gone for good: the exit code is that of a crash, not of a wrong command.
            if before is None:
                raise
            print(error, file=sys.stderr)
            return CRASHED
        finally:
            rendezvous.leave(code)
        if code is not None:
            return code
        waits = f" Waiting {spec.start_s:g} s for it to be started again." if rendezvous.is_someone_lost else ""
        count = f"restart {rendezvous.num_restarts + 1} of at most {most}"
        print(f"Restarting ({count}).{waits}", file=sys.stderr, flush=True)
        before, spec = rendezvous, replace(spec, address=rendezvous.address)


def _generation(plan: ResolvedRun, rendezvous: Rendezvous, began: float) -> int:
    spec = rendezvous.spec
    if spec.index == 0:
        print(f"Waiting for {spec.count - 1} more at {rendezvous.address[0]}:{rendezvous.address[1]}", flush=True)
    run_dir = rendezvous.join(_fingerprint(plan), plan.run_dir)
    plan = replace(plan, run_dir=run_dir)
    with Scratch() as private:
        # Machine 0 chooses the run folder: the name may contain the time, and the folder may be on its own disk.
        save_resolved(plan, private / "config.resolved.yaml")
        try:
            code = launch_local(plan, rendezvous, private, began)
        except OSError as error:
            raise LaunchError(
                f"config.CHECKPOINT.DIR: cannot write to {run_dir} here ({error.strerror}). Name another folder."
            ) from error
    if code == 0 and spec.index > 0:
        print(f"Done; machine 0 has the results, in {run_dir}", file=sys.stderr)
    return code


def _fingerprint(plan: ResolvedRun) -> str:
    """Return a digest of the settings that must be equal on all machines: no folders, no machine-specific values."""
    settings = asdict(plan)
    for name in ("run_dir", "notes", "interpolations", "copies", "threads_per_rank", "recipe"):
        del settings[name]
    config = settings["config"]
    settings["config"] = {**config, "CHECKPOINT": None, "DISTRIBUTED": {**config["DISTRIBUTED"], "SECRET_FILE": None}}
    text = json.dumps(settings, sort_keys=True, default=str) + __version__
    return hashlib.sha256(text.encode()).hexdigest()
