"""A run on several machines, one launcher on each: started by hand, one command per machine, or by a batch system."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import vissl_zero
from vissl_zero.config.resolve import save_resolved
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.engine import stopping
from vissl_zero.errors import LaunchError
from vissl_zero.launch.key_value_store import load_secret
from vissl_zero.launch.rendezvous import CRASHED, LauncherSpec, Rendezvous
from vissl_zero.launch.run import launch_local
from vissl_zero.launch.run_folder import prepare_folder
from vissl_zero.lifetime import Scratch


def launch_machine(plan: ResolvedRun, user_yaml: str, node_id: int) -> int:
    """Start this machine's part of a run whose machines meet at ``DISTRIBUTED.RUN_ID``; returns the exit code.

    Raises:
        LaunchError: the machines do not find or accept each other, or the run folder cannot be used.
    """
    distributed = plan.config["DISTRIBUTED"]
    host, _, port = distributed["RUN_ID"].rpartition(":")
    spec = LauncherSpec(
        index=node_id,
        count=plan.num_nodes,
        procs=plan.procs_per_node,
        address=(host.strip("[]"), int(port)),
        secret=load_secret(distributed["SECRET_FILE"]),
        timeout_s=plan.sharding.timeout_s,
    )
    with prepare_folder(plan, user_yaml) if node_id == 0 else nullcontext():
        return launch_member(plan, spec)


def launch_member(plan: ResolvedRun, spec: LauncherSpec, announce: Path | None = None) -> int:
    """Join, start the ranks and wait for them; restart at most ``DISTRIBUTED.MAX_RESTARTS`` times if one is lost.

    Args:
        plan: of the run.
        spec: of this launcher.
        announce: file that launcher 0 writes its address to.
    Returns:
        Exit code, as ``launch_local``.
    Raises:
        LaunchError: the machines do not find or accept each other.
    """
    most, began = plan.config["DISTRIBUTED"]["MAX_RESTARTS"], time.time()
    before: Rendezvous | None = None
    while True:
        rendezvous = Rendezvous(spec, announce, before)
        code: int | None = 2
        try:
            code = _generation(plan, rendezvous, began)
            may_start_again = rendezvous.may_start_again and stopping.asked() is None
            if code == CRASHED and may_start_again and rendezvous.num_restarts < most:
                code = None
        except LaunchError as error:
            # At a restart machine 0 may be gone for good: that is the crash's exit code, not a wrong command.
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
        before, spec = rendezvous, dataclasses.replace(spec, address=rendezvous.address)


def _generation(plan: ResolvedRun, rendezvous: Rendezvous, began: float) -> int:
    spec = rendezvous.spec
    if spec.index == 0:
        print(f"Waiting for {spec.count - 1} more at {rendezvous.address[0]}:{rendezvous.address[1]}", flush=True)
    run_dir = rendezvous.join(fingerprint(plan), plan.run_dir)
    plan = dataclasses.replace(plan, run_dir=run_dir)
    with Scratch() as private:
        # Machine 0 decides the run folder: its name may contain the time, and it may be on another machine's disk.
        save_resolved(plan, private / "config.resolved.yaml")
        try:
            code = launch_local(plan, rendezvous, private, began)
        except OSError as error:
            raise LaunchError(f"config.CHECKPOINT.DIR: cannot write to {run_dir} here ({error.strerror}).") from error
    if code == 0 and spec.index > 0:
        print(f"Done; machine 0 has the results, in {run_dir}", file=sys.stderr)
    return code


def fingerprint(plan: ResolvedRun) -> str:
    """A digest of what must be equal on all machines: the plan without folders and machine-specific values."""
    found = dataclasses.asdict(plan)
    for name in ("run_dir", "notes", "interpolations", "copies", "threads_per_rank", "recipe"):
        del found[name]
    config = found["config"]
    found["config"] = {**config, "CHECKPOINT": None, "DISTRIBUTED": {**config["DISTRIBUTED"], "SECRET_FILE": None}}
    text = json.dumps(found, sort_keys=True, default=str) + vissl_zero.__version__
    return hashlib.sha256(text.encode()).hexdigest()
