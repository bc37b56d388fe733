"""First weights, drawn per parameter from (seed, full name).

They depend on neither the order in which the model was built nor on world size, level or number format: each tensor has
a generator of its own, is drawn in float32 on the CPU, then cast.

A module of your own has three ways. With an ``init_parameters(generator_for)`` method it fills its tensors itself:
``generator_for("weight")`` is a generator keyed by (seed, full name of the module, "weight"). With only
``reset_parameters()``, that runs under a generator keyed by the module's name. With neither, the values its constructor
gave are kept (``build_model`` seeds the constructors).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from vissl_zero.models.keyed_random import stable_hash

GeneratorFor = Callable[[str], torch.Generator]


@torch.no_grad()
def initialize_(model: nn.Module, seed: int) -> None:
    """Fill every parameter of ``model`` in place; buffers of norm layers start afresh too.

    Args:
        model: whole and unsharded; on any device, in any number format.
        seed: of the run.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    # Innermost first, so that init_parameters of a parent has the last word; among equals by name, so that what is tied
    # or shared under two names keeps what it was given under the same one, however the model was built.
    for name in sorted(modules, key=lambda name: (-len(name.split(".")) if name else 0, name)):
        module = modules[name]
        generator_for = partial(_generator, seed, name)
        if next(module.parameters(recurse=False), None) is not None:
            _fill(module, generator_for)
        if hasattr(module, "init_parameters"):
            module.init_parameters(generator_for)


def _fill(module: nn.Module, generator_for: GeneratorFor) -> None:
    """Own parameters of one module, by the rule for its type or else by its own ``reset_parameters``."""
    for module_type, rule in _RULES:
        # A subclass with a reset of its own means it.
        if isinstance(module, module_type) and _reset_of(type(module)) is _reset_of(module_type):
            rule(module, generator_for)
            return
    if hasattr(module, "reset_parameters") and not hasattr(module, "init_parameters"):
        _reset(module, generator_for)


def _reset_of(module_type: type) -> object:
    return getattr(module_type, "reset_parameters", None)


def _convolution(module: nn.Module, generator_for: GeneratorFor) -> None:
    """He's normal over fan-out (https://arxiv.org/abs/1502.01852), as in RegNet and ResNet; torch's for the bias."""
    assert isinstance(module, _ConvNd)
    receptive = math.prod(module.kernel_size)
    std = math.sqrt(2.0 / (receptive * module.out_channels))
    module.weight.copy_(torch.empty(module.weight.shape).normal_(0.0, std, generator=generator_for("weight")))
    if module.bias is not None:
        _uniform(module.bias, module.in_channels // module.groups * receptive, generator_for("bias"))


def _linear(module: nn.Module, generator_for: GeneratorFor) -> None:
    """torch's own: uniform within 1 / sqrt(fan-in)."""
    assert isinstance(module, nn.Linear)
    _uniform(module.weight, module.in_features, generator_for("weight"))
    if module.bias is not None:
        _uniform(module.bias, module.in_features, generator_for("bias"))


def _norm(module: nn.Module, generator_for: GeneratorFor) -> None:
    """Weight 1, bias 0; running statistics as new."""
    for name, tensor in module.named_parameters(recurse=False):
        tensor.fill_(0.0 if name == "bias" else 1.0)
    if isinstance(module, _NormBase):
        module.reset_running_stats()


_RULES: tuple[tuple[type, Callable[[nn.Module, GeneratorFor], None]], ...] = (
    (_ConvNd, _convolution),
    (nn.Linear, _linear),
    (_NormBase, _norm),
    (nn.GroupNorm, _norm),
    (nn.LayerNorm, _norm),
)


def _reset(module: nn.Module, generator_for: GeneratorFor) -> None:
    """``reset_parameters`` in float32 under a generator of its own."""
    before = [(tensor.device, tensor.dtype) for tensor in module.parameters(recurse=False)]
    for tensor in module.parameters(recurse=False):
        tensor.data = tensor.data.to(device="cpu", dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator_for("").initial_seed())
        reset = module.reset_parameters
        assert callable(reset)
        reset()
    for tensor, (device, dtype) in zip(module.parameters(recurse=False), before, strict=True):
        tensor.data = tensor.data.to(device=device, dtype=dtype)


def _uniform(tensor: Tensor, fan_in: int, generator: torch.Generator) -> None:
    bound = 1.0 / math.sqrt(fan_in)
    tensor.copy_(torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator))


def _generator(seed: int, module_name: str, parameter: str) -> torch.Generator:
    # torch takes 64 bits, but a negative seed and its unsigned twin are the same: 63 keep it simple.
    return torch.Generator().manual_seed(stable_hash(seed, f"{module_name}.{parameter}") >> 1)
