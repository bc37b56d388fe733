"""A trained trunk to use elsewhere.

In a notebook::

    import vissl_zero
    from PIL import Image
    trunk = vissl_zero.load_trunk("runs/my_run")
    image = trunk.transform(Image.open("cat.jpg").convert("RGB"))
    features = trunk(image[None])  # (1, feature_dim)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from yaml import YAMLError

from vissl_zero.config.saved import load_resolved
from vissl_zero.data.transforms.evaluation import build_eval_pipeline
from vissl_zero.data.transforms.pipeline import Pipeline
from vissl_zero.errors import CheckpointError
from vissl_zero.models.model import build_model
from vissl_zero.registry import TRUNKS, load_plugins

_PREFIX = "trunk."


class LoadedTrunk(nn.Module):
    """A trunk that takes one tensor and gives one, in evaluation mode.

    Attributes:
        trunk: as it was trained: list of tensors -> list of features.
        feature_dim: features per image.
    """

    def __init__(self, trunk: nn.Module, pipeline: Pipeline):
        super().__init__()
        self.trunk = trunk
        self.feature_dim: int = trunk.feature_dim  # type: ignore[assignment]
        self._pipeline = pipeline
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Features (B, feature_dim) of images (B, 3, H, W) that went through ``transform``."""
        features: Tensor = self.trunk([images])[0]
        return features

    def transform(self, image: Image.Image) -> Tensor:
        """An RGB image as (3, H, W) float32: sized and normalised as for the run's own evaluation."""
        (crop,) = self._pipeline(image)
        return crop


def load_trunk(run_folder: str | Path, *, imports: bool = False) -> LoadedTrunk:
    """The trunk of a finished run with its trained weights, in float32 on the CPU.

    Nothing that the folder names is run. A trunk of your own is known once the module that registers it is imported.

    Args:
        run_folder: ``config.CHECKPOINT.DIR`` of the run.
        imports: import the modules that the run's ``config.IMPORTS`` names; for a folder that you trust.
    Raises:
        CheckpointError: the folder is not one of a finished run, or its files are damaged or do not fit each other.
    """
    folder = Path(run_folder)
    config_file, weights_file = folder / "config.resolved.yaml", folder / "weights.safetensors"
    _check_files(folder, config_file, weights_file)
    config = _read_config(config_file)
    load_plugins(list(config["IMPORTS"]) if imports else [])
    _require_known(config, folder)
    no_heads = {**config["MODEL"]["HEAD"], "PARAMS": []}
    trunk = build_model({**config["MODEL"], "HEAD": no_heads}).trunk
    weights = _read(weights_file)
    _check_fit(weights, trunk.state_dict(), weights_file)
    trunk.load_state_dict(weights)
    return LoadedTrunk(trunk, build_eval_pipeline(config["DATA"]))


def _require_known(config: dict[str, Any], folder: Path) -> None:
    name, modules = config["MODEL"]["TRUNK"]["NAME"], ", ".join(map(str, config["IMPORTS"]))
    if name not in TRUNKS:
        trusting = f" It says that {modules} did; load_trunk(..., imports=True) imports that." if modules else ""
        raise CheckpointError(
            f"{folder} is of a run with a trunk of its own, {name!r}. Import the module that registers it first."
            f"{trusting}"
        )


def _check_files(folder: Path, config_file: Path, weights_file: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"There is no folder {folder}. Give the run folder that training printed at its end.")
    if not config_file.is_file():
        raise CheckpointError(
            f"{folder} is not a run folder: it has no {config_file.name}. Give the folder that config.CHECKPOINT.DIR "
            "named, or that training printed at its end."
        )
    if not weights_file.is_file():
        raise CheckpointError(
            f"{folder} has no {weights_file.name}: that is written when a run ends. Let it finish, or train again."
        )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return load_resolved(path).config
    # The file is ours, but people edit and truncate files: whatever is wrong with it, the remedy is the same.
    except (OSError, YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"{path} cannot be read ({problem}). Copy it again from where the run wrote it."
        ) from error


def _read(path: Path) -> dict[str, Tensor]:
    """The trunk's tensors, without their prefix. The heads' are not read."""
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(_PREFIX)]  # noqa: SIM118 - not a mapping
            return {name.removeprefix(_PREFIX): file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Copy it again from where the run wrote it.") from error


def _check_fit(weights: dict[str, Tensor], wanted: dict[str, Any], path: Path) -> None:
    missing = sorted(wanted.keys() - weights.keys())
    extra = sorted(weights.keys() - wanted.keys())
    other = sorted(n for n in wanted.keys() & weights.keys() if wanted[n].shape != weights[n].shape)
    for names, what in (
        (missing, "lacks"),
        (extra, "has, and the trunk of config.resolved.yaml has not,"),
        (other, "has in another shape"),
    ):
        if names:
            raise CheckpointError(
                f"{path} {what} {_PREFIX}{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}. "
                "The weights and config.resolved.yaml must be of the same run."
            )
