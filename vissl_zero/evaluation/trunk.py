"""A trained trunk for use in other code.

In a notebook::

    import vissl_zero
    from PIL import Image
    trunk = vissl_zero.load_trunk("runs/my_run")
    image = trunk.transform(Image.open("cat.jpg").convert("RGB"))
    features = trunk(image[None])  # (1, feature_dim)
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from vissl_zero.checkpoint.first_weights import match
from vissl_zero.checkpoint.folder import Checkpoint
from vissl_zero.checkpoint.library_folder import is_library_folder
from vissl_zero.checkpoint.named_weights import locate
from vissl_zero.checkpoint.weights import (
    FILES_OF_A_RUN,
    TEACHER_WEIGHTS_FILE,
    WEIGHTS_FILE,
    Weights,
    WeightsFile,
    final_step,
    open_store,
    weights_of,
)
from vissl_zero.config.block_data import block_of
from vissl_zero.config.blocks.data import Data
from vissl_zero.config.blocks.model_and_loss import ModelConfig
from vissl_zero.config.components.trunks import trunk_component, trunk_params
from vissl_zero.config.weights_name import scheme_of
from vissl_zero.data.split_pipeline import build_eval_pipeline, described_views
from vissl_zero.errors import CheckpointError
from vissl_zero.models.model import build_model
from vissl_zero.models.weight_names import CLASSIFIER, has_classifier
from vissl_zero.registry import TRUNKS, load_plugins
from vissl_zero.resolve.data_plan import names_like
from vissl_zero.resolve.saved import RESOLVED_FILE, leaves, read_saved, with_references
from vissl_zero.weights.network_name import network_name
from vissl_zero.weights.reading import as_run, find

_PREFIX = "trunk."
_FINAL_FILES = {"student": WEIGHTS_FILE, "teacher": TEACHER_WEIGHTS_FILE}
# A tiny network may have images with more pixels a side than it has weights.
_LEAST_LIMIT = 100_000


class Transform:
    """Resizes and normalizes an RGB image to (3, H, W) float32, as in the run's own evaluation."""

    def __init__(self, data_cfg: Data):
        self._pipeline, self._words = build_eval_pipeline(data_cfg), described_views(data_cfg)

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the transformed image, (3, H, W) float32."""
        (crop,) = self._pipeline(image)
        return crop

    def __repr__(self) -> str:
        return f"Transform({self._words})"


@dataclass(frozen=True)
class Classifier:
    """The classifier of a run, which takes the features of its trunk.

    Attributes:
        layer: linear layer from features to a score for each class, in float32 on the CPU.
        classes: names of the classes by index; empty if the weights do not name them.
    """

    layer: nn.Linear
    classes: tuple[str, ...] = ()


class LoadedTrunk(nn.Module):
    """A trained trunk in evaluation mode, which maps a tensor of images to a tensor of features.

    Attributes:
        trunk: network as trained: list of tensors -> list of features.
        feature_dim: number of features of an image.
        path: path of the weights: a file, or a checkpoint's folder.
        recognized: description of the network, with its sizes.
        transform: transform from an RGB image to (3, H, W) float32, as in the run's own evaluation; print it to see
            its steps.
        config: configuration of the trunk: ``MODEL`` (TRUNK) and ``DATA`` (TRAIN and TEST with TRANSFORMS).
    """

    def __init__(self, trunk: nn.Module, config: Mapping[str, Any], path: Path, recognized: str):
        super().__init__()
        self.config = config
        self.path = path
        self.recognized = recognized
        self.trunk = trunk
        self.feature_dim: int = trunk.feature_dim  # type: ignore[assignment]
        self.transform = Transform(block_of(Data, config["DATA"]))
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Compute features (B, feature_dim) of images (B, 3, H, W), which ``transform`` has prepared."""
        features: Tensor = self.trunk([images])[0]
        return features


def load_trunk(run_folder: str | Path, *, which: str = "student", imports: bool = False) -> LoadedTrunk:
    """Load the trunk of a run with its trained weights, in float32 on the CPU.

    If the run has ended, these are its final weights. If not, they are those of its newest complete checkpoint, which a
    warning names. Data are checked against their checksums.

    No code that the folder names is run, and the environment is not read. For a custom trunk, import the module that
    registers it first.

    Other weights are accepted too: a file of another program, a folder of transformers or timm, or a library's name
    (``timm:vit_small_patch14_dinov2.lvd142m``, ``torchhub:dinov2_vits14``; docs/weights.md). Their network is
    recognized by names and shapes of the tensors.

    Args:
        run_folder: ``config.CHECKPOINT.DIR`` of the run, a checkpoint or weights file in it, or other weights.
        which: "student" for the trained model, or "teacher" for the momentum copy, if the method has a teacher.
        imports: whether to import the modules in the run's ``config.IMPORTS``; only for a folder that you trust.
    Raises:
        CheckpointError: there are no such weights, files are damaged or inconsistent, or there is no teacher.
        ValueError: ``which`` has another value.
    """
    if which not in _FINAL_FILES:
        raise ValueError(f"which must be {' or '.join(map(repr, _FINAL_FILES))}, not {which!r}")
    if is_of_no_run(str(run_folder)):
        return _of_no_run(str(run_folder), which)
    path = Path(run_folder).expanduser()
    with weights_of(_store(path, _FINAL_FILES[which]), which) as weights:
        source = weights.path
        config = _config(weights)
        try:
            load_plugins(list(map(str, config["IMPORTS"])) if imports else [])
            _require_known(config, path)
            return LoadedTrunk(_trunk(config, weights), config, source, network_name(config["MODEL"]["TRUNK"]))
        except CheckpointError:
            raise
        except Exception as error:
            # The configuration may be from anywhere. The remedy is the same for every error in building from it.
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise CheckpointError(
                f"No trunk can be built from the configuration of {source} ({reason}). "
                "Copy it again from where the run wrote it."
            ) from error


def load_classifier(run_folder: str | Path, *, which: str = "student") -> Classifier:
    """Load the last layer of a run that predicts classes.

    Args:
        run_folder, which: see ``load_trunk``.
    Raises:
        CheckpointError: the run has no head of one linear layer on the features of its trunk.
    """
    path = Path(run_folder).expanduser()
    if is_of_no_run(str(run_folder)):
        raise CheckpointError(f"{run_folder} is of no run here, and classifiers of others are not read.")
    with weights_of(_store(path, _FINAL_FILES[which]), which) as weights:
        config = _config(weights)
        params, taps = config["MODEL"]["HEAD"]["PARAMS"], config["MODEL"].get("FEATURE_EVAL_SETTINGS", {})
        is_linear = len(params) == 1 and params[0][0] == "mlp" and params[0][1].get("skip_last_layer_relu_bn", True)
        # A head on an inner layer does not see the features of the trunk.
        is_tapped = bool(taps.get("LINEAR_EVAL_FEAT_POOL_OPS_MAP"))
        if not is_linear or is_tapped or not has_classifier(weights.tensors):
            raise CheckpointError(
                f"{path} has no head of one linear layer on the features of its trunk, such as finetune/classification "
                "trains. Leave out --classifier to export the trunk."
            )
        names = [name for name in weights.tensors if name.startswith(f"{CLASSIFIER}.")]
        weights.require_undamaged(names)
        tensors = {name.removeprefix(f"{CLASSIFIER}."): weights.read(name).float() for name in names}
        num_classes, width = tensors["weight"].shape
        layer = nn.Linear(width, num_classes, bias="bias" in tensors)
        layer.load_state_dict(tensors)
        return Classifier(layer.requires_grad_(False), _class_names(weights, num_classes))


def _class_names(weights: Weights, num_classes: int) -> tuple[str, ...]:
    if not isinstance(weights.store, WeightsFile):
        return ()
    try:
        names = tuple(map(str, json.loads(weights.store.metadata.get("classes", "[]"))))
    except (ValueError, TypeError):
        return ()
    return names if len(names) == num_classes else ()


def is_of_no_run(name: str) -> bool:
    """Return whether ``name`` is a library's name of weights, or a file or folder that no run has written."""
    path = Path(name).expanduser()
    if scheme_of(name) or is_library_folder(path):
        return True
    has_run = path.name in FILES_OF_A_RUN and (path.parent / RESOLVED_FILE).exists()
    return path.is_file() and not has_run and path.suffix != ".json"


def _of_no_run(name: str, which: str) -> LoadedTrunk:
    weights = find(name)
    if which == "teacher" and "teacher" not in weights.weights.layout:
        what = f"is of no run here, and holds no teacher ({weights.weights.layout})"
        raise CheckpointError(f"{name} {what}. Take the student, which is the default.")
    config = as_run(weights.network)
    block = {**config["MODEL"], "TRUNK": _with_name(config["MODEL"]["TRUNK"]), "HEAD": {"PARAMS": []}}
    trunk = build_model(block_of(ModelConfig, block)).trunk
    tensors = {f"{_PREFIX}{key}": tensor for key, tensor in trunk.state_dict().items()}
    matched = match(weights.weights, {key: tensor.shape for key, tensor in tensors.items()})
    if lost := matched.lacks("trunk"):
        raise CheckpointError(
            f"{name} was taken for {weights.network.text}, and lacks {len(lost)} of its tensors, such as {lost[0]}. "
            "Write the trunk in a recipe (config.MODEL.TRUNK.NAME), and give its run folder."
        )
    with torch.no_grad():
        for entry in matched.entries:
            tensors[entry.key].copy_(entry.read())
    return LoadedTrunk(trunk, config, locate(name).path, weights.network.text)


def _with_name(trunk: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trunk block as after resolution, with the model of a library among its own keys."""
    if trunk_component(trunk["NAME"]) == trunk["NAME"]:
        return dict(trunk)
    return {**trunk, "PARAMS": trunk_params(trunk["NAME"], trunk.get("PARAMS", {}))}


def _store(path: Path, final_name: str) -> Checkpoint | WeightsFile:
    """Open the final weights, or the newest complete checkpoint if that is of a later step."""
    if not path.exists():
        hint = names_like(path.parent, path.name)
        raise CheckpointError(f"There is no {path}.{hint} Give a file of weights, or the folder of a run.")
    passed_over: list[str] = []
    store = open_store(path, passed_over)
    final = path / final_name
    if isinstance(store, WeightsFile) and path.is_dir() and final_name != WEIGHTS_FILE:
        store.close()
        if not final.is_file():
            raise CheckpointError(f"{path} holds no teacher. docs/methods.md says which methods have one.")
        return WeightsFile(final)
    if isinstance(store, WeightsFile) or store.path == path:
        return store
    last_step = final_step(path)
    # A checkpoint of a later step is of a run that went on after its end.
    if final.is_file() and (last_step or 0) >= store.manifest.step:
        store.close()
        return WeightsFile(final)
    if last_step == store.manifest.step:  # the run has ended; weights without a file of their own are in the checkpoint
        return store
    about = f"{path} has no final weights yet: these are of step {store.manifest.step}, {store.path}."
    # ``stacklevel`` 3 is the caller of ``load_trunk``, whose line is worth showing.
    warnings.warn(" ".join([about, *map("Passed over: {}".format, passed_over)]), stacklevel=3)
    return store


def _config(weights: Weights) -> dict[str, Any]:
    """Read the run's configuration as plain data."""
    if isinstance(weights.store, Checkpoint):
        path, data = weights.path, dict(weights.store.manifest.config)
    else:
        path = weights.path.parent / RESOLVED_FILE
        if weights.path.name not in FILES_OF_A_RUN:
            raise CheckpointError(f"{weights.path} does not name its trunk. Give the run folder.")
        try:
            data = read_saved(path)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path.parent} is not a run folder: it has no {RESOLVED_FILE}. Give the folder that "
                "config.CHECKPOINT.DIR named, or that training printed at its end."
            ) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}). Copy it again from where the run wrote it."
            ) from error
    config = with_references(data["config"]) if isinstance(data.get("config"), dict) else {}
    try:
        trunk = config["MODEL"]["TRUNK"]
        if not isinstance(trunk["NAME"], str) or not isinstance(config["IMPORTS"], list):
            raise TypeError
        # Only to raise KeyError here, with the others: they are read much later.
        config["DATA"], config["MODEL"]["HEAD"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read (it does not describe a trunk). Copy it again from where the run wrote it."
        ) from error
    for key, value in leaves(trunk, "config.MODEL.TRUNK"):
        if isinstance(value, str) and "${" in value:
            raise CheckpointError(
                f"{path}: {key} is {value}, and environment variables are not read here. Write the value itself "
                "into a copy of the file."
            )
    return config


def _require_known(config: Mapping[str, Any], path: Path) -> None:
    name, modules = config["MODEL"]["TRUNK"]["NAME"], ", ".join(map(str, config["IMPORTS"]))
    if trunk_component(name) not in TRUNKS:
        trusting = f" It says that {modules} did; load_trunk(..., imports=True) imports that." if modules else ""
        raise CheckpointError(
            f"{path} is of a run with a custom trunk, {name!r}. Import the module that registers it first.{trusting}"
        )
    if config["MODEL"].get("LORA", {}).get("USE_LORA") and find_spec("peft") is None:
        raise CheckpointError(f"{path} has LoRA adapters, which need the package peft: pip install 'vissl-zero[lora]'.")


def _trunk(config: Mapping[str, Any], weights: Weights) -> nn.Module:
    """Build the trunk with its weights; it is first built without memory, to check that the weights fit."""
    infos = {name.removeprefix(_PREFIX): i for name, i in weights.tensors.items() if name.startswith(_PREFIX)}
    # No size of a network exceeds the number of its weights.
    limit = max(_LEAST_LIMIT, sum(info.num_elements for info in infos.values()))
    numbers = [value for _, value in leaves(config["MODEL"]["TRUNK"]) if isinstance(value, (int, float))]
    if any(abs(number) > limit for number in numbers):
        raise CheckpointError(f"{weights.path} does not fit its configuration: its trunk is far larger.")
    model = block_of(ModelConfig, config["MODEL"])
    # Heads are not loaded, and a custom one need not be registered here.
    model.HEAD.PARAMS = []
    # On the meta device first: a hostile configuration could ask for any amount of memory.
    with torch.device("meta"), _at_most(1000 + 100 * len(infos), weights.path):
        wanted = build_model(model).trunk.state_dict()
    _require_fit({n: i.shape for n, i in infos.items()}, {n: tuple(t.shape) for n, t in wanted.items()}, weights.path)
    weights.require_undamaged(_PREFIX + name for name in infos)
    trunk = build_model(model).trunk
    trunk.load_state_dict({name: weights.read(_PREFIX + name) for name in infos})
    return trunk


@contextmanager
def _at_most(num_modules: int, path: Path) -> Iterator[None]:
    """Limit the number of modules in a construction, which a hostile configuration could make endless. A context."""
    count = 0

    def on_module(parent: nn.Module, name: str, child: nn.Module) -> None:
        nonlocal count
        count += 1
        if count > num_modules:
            raise CheckpointError(f"{path} does not fit its configuration: its trunk is far larger.")

    handle = register_module_module_registration_hook(on_module)
    try:
        yield
    finally:
        handle.remove()


def _require_fit(shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], path: Path) -> None:
    missing = sorted(wanted.keys() - shapes.keys())
    extra = sorted(shapes.keys() - wanted.keys())
    other = sorted(name for name in wanted.keys() & shapes.keys() if wanted[name] != shapes[name])
    for names, what in (
        (missing, "lacks"),
        (extra, f"has, and the trunk of {RESOLVED_FILE} has not,"),
        (other, "has in another shape"),
    ):
        if names:
            raise CheckpointError(
                f"{path} {what} {_PREFIX}{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}. "
                f"The weights and {RESOLVED_FILE} must be of the same run."
            )
