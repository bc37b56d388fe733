"""``vissl-zero checkpoint <word> ...``: look into checkpoints, check them, compare them, take models out and in."""

from __future__ import annotations

from collections.abc import Sequence

from vissl_zero.errors import ConfigError, did_you_mean

WORDS = ("inspect", "verify", "diff", "export", "import")
USAGE = """\
vissl-zero checkpoint <word> <path> ...

  inspect PATH           what it holds: step, level, processes, bytes by kind, settings, tensors
  verify PATH            read everything against the checksums; names damaged files (exit code 0 complete, 1 not)
  diff A B               settings and tensors that differ (exit code 0 equal, 1 different)
  export PATH --to FILE  the model as one safetensors or torch file, under our names or torchvision's or timm's
  import FILE --to OUT   weights of VISSL (consolidated, sharded, sliced), torch or safetensors, read without running
                         anything in them

PATH is a run folder (its newest checkpoint that opens, else the weights written at its end), one of its
checkpoints/step_<steps> folders, or a safetensors file. vissl-zero checkpoint <word> --help has the options.
Nothing in a checkpoint is ever run.
"""


def checkpoint(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        ConfigError: the arguments are wrong.
        CheckpointError: what they name is.
    """
    word = arguments[0] if arguments else ""
    if word in ("", "--help", "-h", "help"):
        print(USAGE, end="")
        return 0 if word else 2
    if word not in WORDS:
        hint = did_you_mean(word, WORDS)
        raise ConfigError(f"vissl-zero checkpoint {word}: must be one of {', '.join(WORDS)}.{hint}")
    rest = list(arguments[1:])
    # Imported here: reading tensors needs torch, help does not.
    if word == "inspect":
        from vissl_zero.commands.checkpoint.words import inspect

        return inspect(rest)
    if word == "verify":
        from vissl_zero.commands.checkpoint.words import verify

        return verify(rest)
    if word == "diff":
        from vissl_zero.commands.checkpoint.words import diff

        return diff(rest)
    if word == "export":
        from vissl_zero.commands.checkpoint.words import export

        return export(rest)
    from vissl_zero.commands.checkpoint.words import import_

    return import_(rest)
