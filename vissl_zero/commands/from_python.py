"""``vissl_zero.train``, ``plan``, ``evaluate`` and ``embed``: the command line from Python, also in a notebook."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vissl_zero.atomic import read_regular
from vissl_zero.config.override_words import as_word, pairs_of
from vissl_zero.engine.stopping import INTERRUPTED, STOPPED, read_jobs, read_summary
from vissl_zero.errors import ConfigError, LaunchError, Problem
from vissl_zero.lifetime import SWEEP_VARIABLE

if TYPE_CHECKING:
    import numpy as np

    from vissl_zero.evaluation.trunk import LoadedTrunk

Overrides = Mapping[str, Any] | Sequence[str]
_FOLDER = "config.CHECKPOINT.DIR"
_INPUT_IS_WRONG = 2
_TAIL_LINES = 40


@dataclass(frozen=True)
class Run:
    """A run that ``train`` has started, after its end.

    Attributes:
        folder: the run folder.
        exit_code: 0: complete; 75 or 130: saved and stopped; ``train`` with the same folder resumes the run.
    """

    folder: Path
    exit_code: int

    @property
    def is_complete(self) -> bool:
        """Return whether the run is complete."""
        return self.exit_code == 0

    @property
    def seeds(self) -> list[Run]:
        """Return the runs of ``config.SEEDS``, in order; empty for a run of one seed."""
        jobs = read_jobs(self.folder)
        return [Run(path, STOPPED if note.code is None else note.code) for path, note in jobs.items()]

    @property
    def summary(self) -> dict[str, Any]:
        """Return ``summary.json`` of a complete run (keys: docs/run_folder.md); empty if the run was stopped.

        For several seeds, these are the means in ``seeds.json`` (keys: docs/runs.md).
        """
        if (own := read_summary(self.folder)) or not self.is_complete:
            return own
        seeds = self.seeds
        if len(seeds) < 2:
            return seeds[0].summary if seeds else {}
        (group,) = json.loads(read_regular(self.folder / "seeds.json", 2**26))
        return {name: estimate["mean"] for name, estimate in group["figures"].items()}

    def load_trunk(self, **options: Any) -> LoadedTrunk:
        """Return the trained trunk; ``options`` are those of ``vissl_zero.load_trunk``. Imports torch.

        Raises:
            CheckpointError: see ``vissl_zero.load_trunk``. With several seeds, call this on each of ``seeds``.
        """
        import vissl_zero

        return vissl_zero.load_trunk(self.folder, **options)


def train(recipe: str, overrides: Overrides | None = None) -> Run:
    """Train a recipe in processes of its own, and wait for its end.

    The same as ``vissl-zero config=<recipe> key=value ...``, with the same checks. Progress is printed line by line, as
    a notebook shows it. Ctrl-C, or a notebook's interrupt, has the run save and stop; call ``train`` with the same
    ``config.CHECKPOINT.DIR`` to resume. The processes end with this one.

    Args:
        recipe: what ``config=`` names, such as "pretrain/simclr/my_photos".
        overrides: full key -> value, such as ``{"config.ZERO.LEVEL": 3}``. Values are plain Python: numbers, texts,
            None, lists, dicts. Or a list of words as of the command line: ``["config.ZERO.LEVEL=3"]``. Without
            "config.CHECKPOINT.DIR" the run gets a new folder below ./runs.
    Raises:
        ConfigError: the recipe, a key or the data are wrong; the message names all problems.
        LaunchError: the run crashed; the message has the end of its output.
    """
    words = [_recipe_word(recipe), *_words(overrides)]
    folder = _named_folder(words)
    if not folder:
        # Named here, not by Hydra, because the caller gets the folder back.
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")[:-3]
        folder = str(Path("runs") / f"{stamp}_{recipe.replace('/', '-')}")
        words.append(f"{_FOLDER}={as_word(folder)}")
    code, tail = _command(words)
    if code == _INPUT_IS_WRONG:
        raise ConfigError(tail)
    if code not in (0, STOPPED, INTERRUPTED):
        raise LaunchError(f"The run in {folder} ended with exit code {code}.\n{tail}")
    return Run(Path(folder).expanduser().absolute(), code)


def plan(recipe: str, overrides: Overrides | None = None, *, memory_gb: float | None = None) -> dict[str, Any]:
    """List every plan of a recipe with its memory and time, without training: ``vissl-zero plan --json``.

    Args:
        recipe: what ``config=`` names.
        overrides: see ``train``.
        memory_gb: GiB for a rank's tensors, as in ``--memory-gb``: 38 for a GPU of 40 GB; None: this machine's.
    Returns:
        The plans and the chosen plan, as docs/plan.md describes.
    Raises:
        ConfigError: the recipe or a key is wrong.
    """
    memory = [] if memory_gb is None else [f"--memory-gb={memory_gb}"]
    command = [sys.executable, "-m", "vissl_zero.cli", "plan", _recipe_word(recipe), *_words(overrides), "--json"]
    done = subprocess.run([*command, *memory], capture_output=True, text=True, check=False)
    if done.returncode == _INPUT_IS_WRONG:
        raise ConfigError(done.stderr.strip())
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        raise LaunchError(f"vissl-zero plan ended with exit code {done.returncode}.\n{done.stderr.strip()}") from None


def evaluate(weights: str | Path, data: str | Path, overrides: Overrides | None = None) -> dict[str, Any]:
    """Measure weights on class folders, without a recipe: ``vissl-zero evaluate --json``. Nothing is trained.

    Args:
        weights: a run folder, a file, or a name such as "timm:vit_small_patch16_224" (docs/weights.md).
        data: a folder with train/ and val/, each with a folder for each class.
        overrides: see ``train``; ``{"config.ZERO.LEVEL": 3}``, for example.
    Returns:
        Top-1 by kNN and by a linear probe, RankMe, what was recognized, and the protocol of each figure.
    Raises:
        ConfigError: the weights, the folder or a key are wrong.
        LaunchError: the run crashed; with the end of what it printed.
    """
    words = ["evaluate", str(weights), "--data", _absolute(data), "--json", "--quiet", *_words(overrides)]
    return dict(json.loads(_output_of(words)))


def embed(
    weights: str | Path, folder: str | Path, overrides: Overrides | None = None
) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Compute the features of all images in a folder and the folders in it, as ``vissl-zero embed`` does.

    Args:
        weights: see ``evaluate``.
        folder: holds images, or folders of them.
        overrides: see ``train``.
    Returns:
        Features of shape (N, F), and N names: paths below the folder.
    Raises:
        ConfigError: the weights, the folder or a key are wrong.
        LaunchError: the run crashed; with the end of what it printed.
    """
    import numpy as np

    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "features.npz"
        words = ["embed", str(weights), _absolute(folder), "--out", str(out), "--quiet", *_words(overrides)]
        _output_of(words)
        with np.load(out) as file:
            return file["features"], file["names"].tolist()


def _absolute(folder: str | Path) -> str:
    return str(Path(folder).expanduser().absolute())


def _output_of(words: Sequence[str]) -> str:
    """Run a command, which must succeed. Return its output."""
    printed: list[str] = []
    code, tail = _command(words, printed.append)
    if code == _INPUT_IS_WRONG:
        raise ConfigError(tail)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise LaunchError(f"vissl-zero {words[0]} ended with exit code {code}.\n{tail}")
    if tail:  # for example, warnings about unread photos
        print(tail, file=sys.stderr)
    return "".join(printed)


_print_now = partial(print, end="", flush=True)


def _command(words: Sequence[str], take: Callable[[str], object] = _print_now) -> tuple[int, str]:
    """Run ``vissl-zero``, and forward each line of its output. Return its exit code and the end of its errors."""
    # In its own session, an interrupt is forwarded once, and a second interrupt ends it at once, as in a terminal.
    process = subprocess.Popen(
        [sys.executable, "-m", "vissl_zero.cli", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Python writes to a pipe in blocks: progress would arrive late, and in lumps.
        env={**os.environ, "PYTHONUNBUFFERED": "1", SWEEP_VARIABLE: str(os.getpid())},
        start_new_session=True,
    )
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    assert process.stdout is not None and process.stderr is not None
    # In a thread: if nobody reads its errors, the pipe fills up and the process waits forever.
    errors = threading.Thread(target=lambda stream: tail.extend(stream), args=(process.stderr,), daemon=True)
    errors.start()
    while True:
        try:
            for line in process.stdout:
                take(line)
            code = process.wait()
            break
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
    errors.join()
    return code, "".join(tail).strip()


def _recipe_word(recipe: str) -> str:
    if isinstance(recipe, str):
        return f"config={recipe}"
    fix = f'To resume a run, give its recipe, and its folder as {{"{_FOLDER}": <folder>}} in overrides.'
    raise ConfigError([Problem("recipe", repr(recipe), "must be the name of a recipe, a text", fix)])


def _words(overrides: Overrides | None) -> list[str]:
    if isinstance(overrides, Mapping):
        return [f"{key}={as_word(value)}" for key, value in overrides.items()]
    if overrides is None:
        return []
    if isinstance(overrides, list | tuple) and all(isinstance(word, str) for word in overrides):
        return list(overrides)
    must = "must be a dict of keys and values, or a list of words"
    fix = 'Write {"config.ZERO.LEVEL": 3} or ["config.ZERO.LEVEL=3"], for example.'
    raise ConfigError([Problem("overrides", repr(overrides), must, fix)])


def _named_folder(words: Sequence[str]) -> str:
    """Return the run folder in the overrides, without the quotes of Hydra's grammar; empty if they name none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    from vissl_zero.config.compose import plain_words

    word = f"{_FOLDER}={pairs_of(words).get(_FOLDER, '')}"
    try:
        return str(OverridesParser.create().parse_override(*plain_words([word])).value() or "")
    except OverrideParseException:
        return word  # the command reports what is wrong
