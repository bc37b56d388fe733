"""Initial weights, drawn for each parameter from (seed, full name).

They do not depend on the order of construction, the world size, the level or the number format: each tensor has its own
generator, and is drawn in float32 on the CPU and then cast.

A custom module has three options. With a method ``init_parameters(generator_for)`` it fills its tensors itself:
``generator_for("weight")`` is a generator keyed by (seed, full name of the module, "weight"). With only
``reset_parameters()``, this runs under a generator keyed by the module's name. With neither, the values of its
constructor are kept (``build_model`` seeds the constructors).

Parameters with a rule here may be on the meta device (``models/bare.py``): ``FirstWeights`` then fills them by units.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from vissl_zero.models.keyed_random import stable_hash
from vissl_zero.models.weight_names import without_base_layer

GeneratorFor = Callable[[str], torch.Generator]


@torch.no_grad()
def initialize_(model: nn.Module, seed: int) -> None:
    """Initialize every parameter of ``model`` in place, and reset the buffers of norm layers.

    Args:
        model: unsharded; on any device, in any number format.
        seed: seed of the run.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    _initialize(modules, {name: name for name in modules}, seed)


class FirstWeights:
    """The initial weights of a model, filled in at once or unit by unit, with the same bits.

    The constructor fills a model without meta tensors. Any other model needs memory for one unit at a time: a unit is
    drawn on the CPU in the dtype in which it was built, and then cast to its dtype at the time.

    Args:
        model: just built.
        seed: seed of the run.
        drawn_as: name of a head -> name that keys its draws instead.

    Attributes:
        loaded: weights that replace drawn ones, by full name; functions that read a tensor.
    """

    def __init__(self, model: nn.Module, seed: int, drawn_as: Mapping[str, str] | None = None):
        self.loaded: Mapping[str, Callable[[], Tensor]] = {}
        self._seed = seed
        self._drawn_as = dict(drawn_as or {})
        self._waiting = dict(model.named_modules(remove_duplicate=False))
        self._units = outermost_units(model)
        self._dtypes = {
            f"{name}.{key}": tensor.dtype for name, module in self._waiting.items() for key, tensor in _own(module)
        }
        if not any(param.is_meta for param in model.parameters()):
            self.fill_("")

    def of_copy(self, model: nn.Module) -> FirstWeights:
        """Return the same weights for a copy of the model, which may lack modules; filled modules need no filling."""
        other = copy.copy(self)
        # Shared modules are filled under their names in the original, so that a copy has the same weights.
        other._waiting = {name: m for name, m in model.named_modules(remove_duplicate=False) if name in self._waiting}
        return other

    @torch.no_grad()
    def fill_(self, name: str) -> None:
        """Fill module ``name`` and its whole unit, unless they are filled already; "" is the model."""
        # A unit at once: an init_parameters of its parent may span its layers.
        name = next((unit for unit in self._units if _is_in(name, unit)), name)
        modules = {key: self._waiting.pop(key) for key in list(self._waiting) if _is_in(key, name)}
        tensors = [(f"{name}.{key}", t) for name, module in modules.items() for key, t in _own(module)]
        dtypes = [(full_name, tensor, tensor.dtype) for full_name, tensor in tensors]
        for full_name, tensor, _ in dtypes:
            if isinstance(tensor, nn.Parameter) and tensor.is_meta:
                replace_data_(tensor, torch.empty(tensor.shape, dtype=self._dtypes[full_name]))
            tensor.data = tensor.data.to(self._dtypes[full_name])
        _initialize(modules, {name: self._key(name) for name in modules}, self._seed)
        for full_name, tensor, dtype in dtypes:
            # After drawing, which may fill several tensors of a module, of which only some are loaded.
            if read := self.loaded.get(full_name.lstrip(".")):
                tensor.copy_(read())
            tensor.data = tensor.data.to(dtype)

    def _key(self, name: str) -> str:
        """Return the name that keys a module's draws."""
        for head, other in self._drawn_as.items():
            if _is_in(name, head):
                return f"{other}{name[len(head) :]}".removeprefix(".")
        return name


def outermost_units(model: nn.Module) -> list[str]:
    """Return the names of the model's ``zero_units`` that are in no other unit; each is filled at once."""
    zero_units = getattr(model, "zero_units", None)
    units = set(zero_units()) if callable(zero_units) else set()
    names = [name for name, module in model.named_modules() if module in units]
    return [name for name in names if not any(_is_in(name, other) and name != other for other in names)]


def rule_of(module: nn.Module) -> Callable[[nn.Module, GeneratorFor], None] | None:
    """Return the rule for the type of ``module``; a subclass with its own ``reset_parameters`` has none."""
    for module_type, rule in _RULES:
        # A subclass that overrides reset_parameters wants other weights.
        if isinstance(module, module_type) and _reset_of(type(module)) is _reset_of(module_type):
            return rule
    return None


def has_rule(module: nn.Module, key: str) -> bool:
    """Check whether the rule for ``module`` overwrites its parameter ``key``."""
    rule = rule_of(module)
    return rule is _norm or (rule is not None and key in ("weight", "bias"))


def replace_data_(param: nn.Parameter, data: Tensor) -> None:
    """Replace ``param.data``, also by a tensor of another device; ties and attributes remain."""
    # Assigning ``param.data`` raises between CPU and meta. swap_tensors keeps the object.
    other = nn.Parameter(data, requires_grad=param.requires_grad)
    other.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, other)


def _is_in(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")


def _own(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    both = (*module._parameters.items(), *module._buffers.items())
    return [(key, tensor) for key, tensor in both if tensor is not None]


def _initialize(modules: Mapping[str, nn.Module], keys: Mapping[str, str], seed: int) -> None:
    """Fill ``modules``, by name, each from a generator keyed by its name in ``keys``."""
    # Innermost first, so that init_parameters of a parent overrides its children; among equals by name, so that tied
    # parameters have the values of the same name, however the model was built. Layers with adapters are last: modules
    # around them do not know adapters, and would draw them like any other layer.
    order = sorted(modules, key=lambda name: (-len(name.split(".")) if name else 0, name))
    for name in sorted(order, key=lambda name: hasattr(modules[name], "lora_A")):
        module = modules[name]
        generator_for = partial(_generator, seed, keys[name])
        if next(module.parameters(recurse=False), None) is not None:
            _fill(module, generator_for)
        init_parameters = getattr(module, "init_parameters", None)
        if callable(init_parameters):
            init_parameters(generator_for)


def _fill(module: nn.Module, generator_for: GeneratorFor) -> None:
    """Fill a module's direct parameters by the rule for its type, or else by its ``reset_parameters``."""
    if (rule := rule_of(module)) is not None:
        rule(module, generator_for)
    elif hasattr(module, "reset_parameters") and not hasattr(module, "init_parameters"):
        _reset(module, generator_for)


def _reset_of(module_type: type) -> object:
    return getattr(module_type, "reset_parameters", None)


def _convolution(module: nn.Module, generator_for: GeneratorFor) -> None:
    """Draw weights from He's normal over fan-out (https://arxiv.org/abs/1502.01852), the bias as torch does."""
    assert isinstance(module, _ConvNd)
    # RegNet's and torchvision's ResNet's initialization; torch's default differs.
    receptive = math.prod(module.kernel_size)
    std = math.sqrt(2.0 / (receptive * module.out_channels))
    # Drawn in float32 on the CPU and then copied: other devices and number formats draw other numbers.
    module.weight.copy_(torch.empty(module.weight.shape).normal_(0.0, std, generator=generator_for("weight")))
    if module.bias is not None:
        _uniform(module.bias, module.in_channels // module.groups * receptive, generator_for("bias"))


def _linear(module: nn.Module, generator_for: GeneratorFor) -> None:
    """Draw weights as torch does: uniform within 1 / sqrt(fan-in)."""
    assert isinstance(module, nn.Linear)
    _uniform(module.weight, module.in_features, generator_for("weight"))
    if module.bias is not None:
        _uniform(module.bias, module.in_features, generator_for("bias"))


def _norm(module: nn.Module, generator_for: GeneratorFor) -> None:
    """Set weight to 1 and bias to 0, and reset running statistics."""
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
    """Run ``reset_parameters`` in float32 on the CPU, under a generator keyed by the module's name."""
    before = [(tensor.device, tensor.dtype) for tensor in module.parameters(recurse=False)]
    for tensor in module.parameters(recurse=False):
        # On the CPU: generators of other devices draw other numbers.
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
    # 63 bits: torch takes 64, but maps a negative seed and its unsigned twin to the same state.
    full_name = without_base_layer(f"{module_name}.{parameter}")
    return torch.Generator().manual_seed(stable_hash(seed, full_name) >> 1)
