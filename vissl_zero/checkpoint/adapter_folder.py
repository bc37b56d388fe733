"""Read and write adapters in peft's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vissl_zero.atomic import as_object, read_regular
from vissl_zero.checkpoint.weights import open_weights
from vissl_zero.config.blocks.model_and_loss import ADAPTER_FILES, Lora
from vissl_zero.errors import CheckpointError
from vissl_zero.models.weight_names import adapter_name, is_adapters, timm_name

_KEY = "config.MODEL.LORA.ADAPTER_FOLDER"
# peft writes a few KiB: a larger file is no configuration of adapters, and is not read into memory.
_MAX_BYTES = 2**20
# Settings of peft that do not change the outputs of an adapter. All other settings must be those of plain LoRA, so that
# new settings of a later peft are not ignored.
_WITHOUT_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "peft_version",
    "revision",
    "target_modules",
    "task_type",
)
# Initializations, besides the default (true), that do not change the frozen weights; PiSSA and OLoRA subtract their
# first product from them.
_PLAIN_STARTS = (None, False, "gaussian", "eva", "orthogonal")


def read_adapters(model: nn.Module, options: Lora) -> dict[str, Callable[[], Tensor]]:
    """Return a reader for each adapter tensor of ``model``, by full name; folder and model must have the same tensors.

    Args:
        model: model with adapters; only names and shapes are used.
        options: options of the adapters, and the folder.
    Raises:
        CheckpointError: the folder is unreadable or damaged, or its adapters have other layers, ranks or factors.
    """
    folder = Path(options.ADAPTER_FOLDER)
    _require_same(_config(folder / ADAPTER_FILES[0]), options)
    weights = open_weights(folder / ADAPTER_FILES[1], [], with_data=True)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters() if is_adapters(name)}
    ours = {adapter_name(name): name for name in shapes}
    if lost := sorted(ours.keys() ^ weights.tensors.keys()):
        where = "the file" if lost[0] in ours else "the model"
        raise CheckpointError(
            f"{_KEY}: {folder} is of other layers: {where} lacks {lost[0]} ({len(lost)} such). Write the adapter's "
            "config.MODEL.LORA.TARGET_MODULES, and the trunk that it was trained over."
        )
    for theirs, name in ours.items():
        if weights.tensors[theirs].shape != shapes[name]:
            shape, wanted = list(weights.tensors[theirs].shape), list(shapes[name])
            raise CheckpointError(
                f"{_KEY}: {theirs} is {shape} in the file, and {wanted} here. Write the trunk's size."
            )
    return {name: partial(weights.read, theirs) for theirs, name in ours.items()}


def write_adapters(trunk: nn.Module, folder: Path) -> None:
    """Write a trunk's adapters; peft loads them over timm's model.

    Args:
        trunk: trunk with adapters; on the CPU.
        folder: existing folder.
    """
    from peft import LoraConfig  # takes seconds to import
    from safetensors.torch import save_file

    from vissl_zero.models.lora import ADAPTER, adapted_layers

    configs: Any = trunk.peft_config
    adapter: LoraConfig = configs[ADAPTER]
    state = trunk.state_dict(prefix="trunk.")
    tensors = {adapter_name(name): tensor.contiguous() for name, tensor in state.items() if is_adapters(name)}
    targets = [timm_name(f"trunk.{path}") for path, _ in adapted_layers(trunk)]
    save_file(tensors, folder / ADAPTER_FILES[1], {"format": "pt"})
    config = LoraConfig(
        r=adapter.r, lora_alpha=adapter.lora_alpha, lora_dropout=adapter.lora_dropout, target_modules=targets
    )
    config.inference_mode = True  # as in peft's own files of trained adapters
    config.save_pretrained(str(folder))


def _config(path: Path) -> Mapping[str, Any]:
    try:
        return as_object(read_regular(path, _MAX_BYTES, follow_links=True))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{_KEY}: {path} cannot be read ({error}). Copy it again from where peft saved it."
        ) from error


def _require_same(config: Mapping[str, Any], options: Lora) -> None:
    """Refuse adapters whose outputs would differ under ``options`` with the same weights."""
    from peft import LoraConfig  # takes seconds to import

    wanted = {**LoraConfig().to_dict(), "r": options.R, "lora_alpha": options.LORA_ALPHA}
    # Missing keys count as different: without rank and factor nothing says how strongly the adapters act.
    for key, theirs in {"peft_type": None, "r": None, "lora_alpha": None, **config}.items():
        value = wanted.get(key)
        # What is off may be null, false or an empty list.
        if key in _WITHOUT_EFFECT or theirs == value or not (theirs or value):
            continue
        if key == "init_lora_weights" and theirs in _PLAIN_STARTS:
            continue
        key_here = {"r": "R", "lora_alpha": "LORA_ALPHA"}.get(key)
        fix = f"Write config.MODEL.LORA.{key_here}={theirs}." if key_here else "Save one with plain LoRA."
        raise CheckpointError(f"{_KEY}: {options.ADAPTER_FOLDER} has {key}={theirs}, and must have {value}. {fix}")
