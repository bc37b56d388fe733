"""``vissl-zero checkpoint <subcommand> ...``: look into checkpoints, check and compare them, take models out and in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vissl_zero.errors import ConfigError, did_you_mean

SUBCOMMANDS = ("inspect", "verify", "diff", "export", "import")
USAGE = """\
vissl-zero checkpoint <subcommand> <path> ...

  inspect PATH           what it holds: step, level, processes, bytes by kind, settings, tensors
  verify PATH            read everything against the checksums; names damaged files (exit code 0 complete, 1 not)
  diff A B               settings and tensors that differ (exit code 0 equal, 1 different)
  export PATH --to FILE  the model as one safetensors or torch file, under our names or torchvision's or timm's
  import FILE --to OUT   weights of VISSL (consolidated, sharded, sliced), torch or safetensors, read without running
                         anything in them

PATH is a run folder (its newest checkpoint that opens, else the weights written at its end), one of its
checkpoints/step_<steps> folders, or a safetensors file. vissl-zero checkpoint <subcommand> --help has the options.
Nothing in a checkpoint is ever run.
"""


def checkpoint(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError: the arguments are wrong.
        CheckpointError: what they name is.
    """
    name = arguments[0] if arguments else ""
    if name in ("", "--help", "-h", "help"):
        print(USAGE, end="")
        return 0 if name else 2
    if name not in SUBCOMMANDS:
        hint = did_you_mean(name, SUBCOMMANDS)
        raise ConfigError(f"vissl-zero checkpoint {name}: must be one of {', '.join(SUBCOMMANDS)}.{hint}")
    # Imported here: reading tensors needs torch, help does not.
    from vissl_zero.commands.checkpoint import subcommands

    run: Callable[[Sequence[str]], int] = getattr(subcommands, "import_" if name == "import" else name)
    return run(arguments[1:])
