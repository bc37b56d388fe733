"""Learning rates and weight decays of VISSL's recipes at every step, beside those of VISSL's own code.

    python benchmarks/vissl_schedules.py <checkout of facebookresearch/vissl>
    python benchmarks/vissl_schedules.py <checkout> --match pretrain/swav --different --json schedules.json

VISSL's side is its own code, run from the checkout: its defaults.yaml and the recipe composed by Hydra,
``infer_learning_rate`` of vissl/utils/hydra_config.py, its schedulers and classy-vision's, which ``pip install -e
'.[dev]'`` brings, updated before each step or epoch as classy-vision's optimizer does. Ours is the resolved run and
``build_schedule``. An epoch has ``--steps`` steps, whatever the recipe's data are: schedules follow the share of
training that is done. Compared are the rates of trunk and heads and weight decays that have a schedule.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from vissl_zero.commands.explain import account_of
from vissl_zero.config.recipes import RecipeFile, recipe_files
from vissl_zero.optim.schedules import build_schedule
from vissl_zero.resolve.resolved import ResolvedRun

TOLERANCE = 1e-9
Schedule = Callable[[int], float]


@cache
def _vissl(checkout: Path) -> ModuleType:
    """VISSL's module of the schedules; its schedulers are registered with classy-vision."""
    # Modules around the schedules import these two, which need pandas and more; schedules call nothing in them.
    for name, needed in (("io", ("save_file",)), ("misc", ("is_augly_available", "is_apex_available"))):
        stand_in = ModuleType(f"vissl.utils.{name}")
        for function in needed:
            setattr(stand_in, function, lambda: False)
        sys.modules[stand_in.__name__] = stand_in
    sys.path.insert(0, str(checkout))
    import vissl.optimizers.param_scheduler  # type: ignore[import-not-found]  # noqa: F401
    from vissl.utils import hydra_config  # type: ignore[import-not-found]

    module: ModuleType = hydra_config
    return module


def theirs(recipe: RecipeFile, checkout: Path, steps: int) -> tuple[dict[str, Schedule], int]:
    """VISSL's schedules by name, and the number of steps."""
    from vissl.config import AttrDict  # type: ignore[import-not-found]

    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(checkout / "vissl/config"), version_base="1.3"):
        words = [word for word in recipe.overrides if not word.startswith("engine_name")]
        composed = hydra.compose("defaults", [f"config={recipe.recipe}", *words])
    config = AttrDict(OmegaConf.to_container(composed.config))
    config = _vissl(checkout).infer_learning_rate(config)

    from classy_vision.optim import build_optimizer_schedulers
    from classy_vision.optim.param_scheduler import UpdateInterval

    num_epochs = config.OPTIMIZER.num_epochs

    def at(scheduler: Any) -> Schedule:
        unit = steps if scheduler.update_interval == UpdateInterval.EPOCH else 1
        return lambda step: float(scheduler(step // unit * unit / (num_epochs * steps)))

    schedulers = build_optimizer_schedulers(config.OPTIMIZER)
    return {name: at(scheduler) for name, scheduler in schedulers.items()}, num_epochs * steps


def ours(plan: ResolvedRun, steps: int) -> dict[str, Schedule]:
    """Our schedules by VISSL's names."""
    optimizer = plan.optimizer
    configs: Mapping[str, dict[str, Any] | None] = {
        "lr": optimizer.lr,
        "lr_head": optimizer.lr_head,
        "weight_decay": optimizer.wd_schedule,
        "weight_decay_head": optimizer.wd_head_schedule,
    }
    return {name: build_schedule(config, steps, plan.num_epochs) for name, config in configs.items() if config}


def compared(recipe: RecipeFile, checkout: Path, steps: int) -> dict[str, Any]:
    """The greatest relative difference of each schedule and where it is, or why there is none."""
    row: dict[str, Any] = {"recipe": str(recipe), "differences": {}, "refused": "", "of_vissl": ""}
    plans: list[ResolvedRun] = []
    account = account_of(recipe, then=plans.append)
    if not account.is_accepted or not plans:
        return {**row, "refused": " | ".join(map(str, account.refused))[:300]}
    (plan,) = plans
    if not plan.num_epochs or plan.config.TEST_ONLY:
        return {**row, "refused": "trains nothing"}
    try:
        _vissl(checkout)
        reference, num_steps = theirs(recipe, checkout, steps)
    except Exception as error:  # noqa: BLE001 - what VISSL itself does not build is a figure of its own
        return {**row, "of_vissl": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    for name, schedule in ours(plan, steps).items():
        # A weight decay of the heads without a schedule of its own follows the trunk's.
        expected = reference.get(name) or reference.get(name.removesuffix("_head"))
        if expected is None:
            row["differences"][name] = {"relative": float("inf"), "step": 0, "vissl": None, "ours": schedule(0)}
            continue
        row["differences"][name] = _greatest(schedule, expected, num_steps)
    return row


def _greatest(schedule: Schedule, expected: Schedule, num_steps: int) -> dict[str, Any]:
    def rows() -> Iterator[tuple[float, int, float, float]]:
        for step in range(num_steps):
            wanted, got = expected(step), schedule(step)
            # Where one is 0 and the other is not, the difference is all of it.
            yield abs(wanted - got) / (max(abs(wanted), abs(got)) or 1.0), step, wanted, got

    relative, step, wanted, got = max(rows(), key=lambda row: row[0])
    return {"relative": relative, "step": step, "of": num_steps, "vissl": wanted, "ours": got}


def _word(row: Mapping[str, Any]) -> str:
    if row["refused"]:
        return "trains nothing" if row["refused"] == "trains nothing" else "refused"
    if row["of_vissl"]:
        return "VISSL fails"
    is_equal = all(found["relative"] <= TOLERANCE for found in row["differences"].values())
    return "equal" if is_equal else "different"


def main() -> None:
    """Print the count, and what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of facebookresearch/vissl")
    parser.add_argument("--match", default="", help="only recipes whose name holds this")
    parser.add_argument("--steps", type=int, default=50, help="of an epoch")
    parser.add_argument("--different", action="store_true", help="list the recipes that are not equal")
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    checkout = args.checkout.absolute()
    if not (checkout / "vissl/config/defaults.yaml").is_file():
        parser.error(f"{args.checkout} is no checkout of VISSL: it has no vissl/config/defaults.yaml.")
    chosen = [recipe for recipe in recipe_files(checkout / "configs/config") if args.match in str(recipe)]
    rows = []
    with ProcessPoolExecutor(args.processes) as pool:
        for row in pool.map(partial(compared, checkout=checkout, steps=args.steps), chosen, chunksize=4):
            rows.append(row)
            print(f"\r{len(rows)} of {len(chosen)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    for word, number in Counter(map(_word, rows)).most_common():
        print(f"{number:4} {word}")
    for row in rows:
        if args.different and _word(row) not in ("equal", "trains nothing"):
            far = {name: found for name, found in row["differences"].items() if found["relative"] > TOLERANCE}
            print(f"{_word(row)}: {row['recipe']}: {row['refused'] or row['of_vissl'] or far}")


if __name__ == "__main__":
    main()
