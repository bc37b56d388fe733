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
from vissl_zero.launch.local import launch_local
from vissl_zero.launch.membership import CRASHED, Membership
from vissl_zero.launch.place import Place
from vissl_zero.launch.run import prepare_folder
from vissl_zero.launch.secret import load_secret
from vissl_zero.lifetime import Scratch


def launch_machine(plan: ResolvedRun, user_yaml: str, node_id: int) -> int:
    """Start this machine's part of a run whose machines meet at ``DISTRIBUTED.RUN_ID``; returns the exit code.

    Raises:
        LaunchError: the machines do not find or accept each other, or the run folder cannot be used.
    """
    distributed = plan.config["DISTRIBUTED"]
    host, _, port = distributed["RUN_ID"].rpartition(":")
    place = Place(
        index=node_id,
        count=plan.num_nodes,
        procs=plan.procs_per_node,
        address=(host.strip("[]"), int(port)),
        secret=load_secret(distributed["SECRET_FILE"]),
        timeout_s=plan.sharding.timeout_s,
    )
    with prepare_folder(plan, user_yaml) if node_id == 0 else nullcontext():
        return launch_member(plan, place)


def launch_member(plan: ResolvedRun, place: Place, announce: Path | None = None) -> int:
    """Join, start the ranks and wait for them; again where one was lost, ``DISTRIBUTED.MAX_RESTARTS`` times at most.

    Args:
        plan: of the run.
        place: of this launcher.
        announce: file that launcher 0 writes its address to.
    Returns:
        Exit code, as ``launch_local``.
    Raises:
        LaunchError: the machines do not find or accept each other.
    """
    most, began = plan.config["DISTRIBUTED"]["MAX_RESTARTS"], time.time()
    before: Membership | None = None
    while True:
        membership = Membership(place, announce, before)
        code: int | None = 2
        try:
            code = _round(plan, membership, began)
            may_start_again = membership.may_start_again and stopping.asked() is None
            if code == CRASHED and may_start_again and membership.num_restarts < most:
                code = None
        except LaunchError as error:
            if before is None:
                raise
            print(error, file=sys.stderr)
            return CRASHED
        finally:
            membership.leave(code)
        if code is not None:
            return code
        waits = f" Waiting {place.start_s:g} s for its command to be given again." if membership.is_someone_lost else ""
        count = f"restart {membership.num_restarts + 1} of at most {most}"
        print(f"Starting again ({count}).{waits}", file=sys.stderr, flush=True)
        before, place = membership, dataclasses.replace(place, address=membership.address)


def _round(plan: ResolvedRun, membership: Membership, began: float) -> int:
    place = membership.place
    if place.index == 0:
        print(f"Waiting for {place.count - 1} more at {membership.address[0]}:{membership.address[1]}", flush=True)
    run_dir = membership.join(fingerprint(plan), plan.run_dir)
    plan = dataclasses.replace(plan, run_dir=run_dir)
    with Scratch() as private:
        # The run folder may be of another machine's disk, and its name may have the clock in it: machine 0 decides.
        save_resolved(plan, private / "config.resolved.yaml")
        try:
            code = launch_local(plan, membership, private, began)
        except OSError as error:
            raise LaunchError(f"config.CHECKPOINT.DIR: cannot write to {run_dir} here ({error.strerror}).") from error
    if code == 0 and place.index > 0:
        print(f"Done; machine 0 has the results, in {run_dir}", file=sys.stderr)
    return code


def fingerprint(plan: ResolvedRun) -> str:
    """What must be equal on all machines: the plan, but for folders and what differs by machine."""
    found = dataclasses.asdict(plan)
    for name in ("run_dir", "notes", "interpolations", "copies", "threads_per_rank", "recipe"):
        del found[name]
    config = found["config"]
    found["config"] = {**config, "CHECKPOINT": None, "DISTRIBUTED": {**config["DISTRIBUTED"], "SECRET_FILE": None}}
    text = json.dumps(found, sort_keys=True, default=str) + vissl_zero.__version__
    return hashlib.sha256(text.encode()).hexdigest()
