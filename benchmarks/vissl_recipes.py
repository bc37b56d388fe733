"""The scoreboard of VISSL's own recipes: how many are accepted unmodified, and what blocks the others.

    python benchmarks/vissl_recipes.py <checkout of facebookresearch/vissl>
    python benchmarks/vissl_recipes.py <checkout> --overlays --match benchmark/linear   # more of them, or fewer
    python benchmarks/vissl_recipes.py <checkout> --json scoreboard.json --go-on        # what is not in the file yet
    python benchmarks/vissl_recipes.py <checkout> --whole                               # their parts are built, too

It is ``vissl-zero explain <checkout>/configs/config``, shared among processes and kept. Every recipe is composed and
checked as ``--dry-run`` does before it builds the model, for as many machines as it asks for, each with its GPUs. What
VISSL leaves to its user, paths of data sets and weights, has stand-ins. ``--overlays`` takes in the files that name no
more than a trunk, on the first complete recipe in the nearest folder above. ``--whole`` goes on as ``--dry-run`` does:
transforms, model, loss and teacher are built, without memory for their weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from vissl_zero.commands.explain import Account, account_of, scoreboard
from vissl_zero.config.recipes import recipe_files
from vissl_zero.errors import Problem
from vissl_zero.planner.dry_run import set_stage


def _saved(path: Path) -> list[Account]:
    """Accounts that an earlier call has written."""
    rows = json.loads(path.read_text())
    problems = ("yours", "refused")
    return [Account(**row | {key: [Problem(**one) for one in row[key]] for key in problems}) for row in rows]


def main() -> None:
    """Print the scoreboard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of facebookresearch/vissl")
    parser.add_argument("--overlays", action="store_true", help="every other file that names a trunk too")
    parser.add_argument("--only-overlays", action="store_true", help="these alone")
    parser.add_argument("--match", default="", help="only recipes whose name holds this")
    parser.add_argument("--whole", action="store_true", help="build what the recipe names, too")
    parser.add_argument("--json", type=Path, help="write every account here, as they come")
    parser.add_argument("--go-on", action="store_true", help="keep what stands in --json, look at the others")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--accepted", action="store_true", help="list the accepted recipes")
    parser.add_argument("--refused", action="store_true", help="list the others with their problems")
    args = parser.parse_args()
    root = (args.checkout / "configs/config").absolute()
    if not root.is_dir():
        parser.error(f"{args.checkout} is no checkout of VISSL: it has no configs/config. Name the folder above it.")
    chosen = list(recipe_files(root, args.overlays or args.only_overlays))
    if args.only_overlays:
        complete = set(recipe_files(root))
        chosen = [recipe for recipe in chosen if recipe not in complete]
    chosen = [recipe for recipe in chosen if args.match in str(recipe)]
    accounts = _saved(args.json) if args.go_on and args.json.exists() else []
    seen = {account.name for account in accounts}
    left = [recipe for recipe in chosen if str(recipe) not in seen]
    with ProcessPoolExecutor(args.processes) as pool:
        look = partial(account_of, then=set_stage if args.whole else None)
        for account in pool.map(look, left, chunksize=4):
            accounts.append(account)
            if len(accounts) % 20 == 0 or len(accounts) == len(chosen):
                print(f"\r{len(accounts)} of {len(chosen)}", end="", file=sys.stderr, flush=True)
                if args.json:
                    args.json.write_text(json.dumps([asdict(account) for account in accounts], indent=1))
    print(file=sys.stderr)
    print("\n".join(scoreboard(accounts)))
    for account in accounts:
        if args.accepted and account.is_accepted:
            print(f"  {account.name}")
        if args.refused and not account.is_accepted:
            print("\n".join((account.name, *(f"    {problem}" for problem in account.refused))))


if __name__ == "__main__":
    main()
