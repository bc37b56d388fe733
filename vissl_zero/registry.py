"""The one component registry: methods, trunks, heads, losses, optimizers, schedulers, transforms, ...

A component is a class or a function registered under a name that YAML can say::

    from vissl_zero.registry import HEADS

    @HEADS.register("my_head", config=MyHeadConfig)
    class MyHead(nn.Module): ...

Built-in components are declared by the module that registers them, so that naming one (``vissl-zero list``, a rule that
checks ``LOSS.name``) imports no torch; the module is imported when the component is first used. A user's components are
registered when the modules of ``config.IMPORTS`` or of the entry-point group ``vissl_zero.components`` are imported.
An installed plugin that cannot be imported is named and left out.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from vissl_zero.errors import Problem, RegistryError, did_you_mean

T = TypeVar("T")
_ENTRY_POINT_GROUP = "vissl_zero.components"


@dataclass(frozen=True)
class Component:
    """One registered component.

    Attributes:
        name: what YAML says.
        build: the class or function.
        config: dataclass of the component's own keys, or None where it takes none of its own.
        summary: first line of its docstring.
    """

    name: str
    build: Callable[..., Any]
    config: type | None
    summary: str


class Registry:
    """Components of one kind by name.

    Args:
        kind: singular noun for messages, such as ``"trunk"``.
        key: the configuration key that names one, for messages.
        builtin: name -> (module that registers it, one sentence). The module is imported on first use.
        of_methods: name of the table in a method's ``MethodSpec`` that brings more built-in components of this kind,
            registered beside its loss (``swav.py`` for ``swav_keys.py``); looked up for all methods on first use.
    """

    def __init__(
        self,
        kind: str,
        key: str,
        builtin: Mapping[str, tuple[str, str]],
        of_methods: str | None = None,
    ):
        self.kind = kind
        self.key = key
        self._declared = dict(builtin)
        self._of_methods = of_methods
        self._components: dict[str, Component] = {}

    def builtin(self) -> list[str]:
        """List the names of the built-in components."""
        return sorted(self._builtin)

    @cached_property
    def _builtin(self) -> dict[str, tuple[str, str]]:
        if self._of_methods is None:
            return self._declared
        builtin = dict(self._declared)
        for method, (module, sentence) in METHODS._builtin.items():
            names = getattr(METHODS.get(method).build, self._of_methods)
            # A method's keys are in a module without torch, so that asking for them is cheap; its loss and heads, which
            # need torch, are in the module beside it.
            builtin |= {name: (module.removesuffix("_keys"), sentence) for name in names}
        return builtin

    def register(self, name: str, *, config: type | None = None) -> Callable[[T], T]:
        """Register a class or function under ``name``. A decorator.

        Args:
            name: what YAML will say.
            config: dataclass with the component's own keys and their defaults; values from YAML are checked against it.
        Raises:
            RegistryError: ``name`` is taken by another component.
        """

        def decorate(build: T) -> T:
            owner = self._components.get(name)
            origin = getattr(build, "__module__", "")
            declared = self._builtin.get(name)
            taken_by = owner.build if owner else None
            if owner is not None and not _same_source(owner.build, build):
                raise RegistryError(self._duplicate(name, f"{taken_by!r}"))
            # Also before the built-in module is imported: a plugin must not take the name by being first.
            if declared is not None and declared[0] != origin:
                raise RegistryError(self._duplicate(name, declared[0]))
            if not callable(build):
                raise TypeError(f"{build!r} is not callable, so it cannot be a {self.kind}")
            summary = (inspect.getdoc(build) or "").strip().split("\n", 1)[0]
            self._components[name] = Component(name, build, config, summary)
            return build

        return decorate

    def get(self, name: str) -> Component:
        """Return the component called ``name``; import its module if it is built in.

        Raises:
            RegistryError: no component of that name; the message lists the closest.
        """
        if name not in self._components and name in self._builtin:
            import_module(self._builtin[name][0])
        if name not in self._components:
            raise RegistryError([self.unknown(name)])
        return self._components[name]

    def unknown(self, name: str) -> Problem:
        """Build the problem to report for a name that is not registered."""
        hint = did_you_mean(name, self)
        return Problem(
            key=self.key,
            got=repr(name),
            must=f"must be a known {self.kind}",
            fix=f"Known: {', '.join(self)}.{hint} A component of your own is loaded by config.IMPORTS.",
        )

    def summary(self, name: str) -> str:
        """Describe a component in one sentence, without importing it if it is built in."""
        return self._builtin[name][1] if name in self._builtin else self.get(name).summary

    def _duplicate(self, name: str, owner: str) -> str:
        return f"The {self.kind} name {name!r} is already taken by {owner}. Register yours under another name."

    def __iter__(self) -> Iterator[str]:
        # Also built-in components whose modules nothing has imported yet: messages and ``vissl-zero list`` name all of
        # them.
        return iter(sorted({*self._builtin, *self._components}))

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._components

    def __repr__(self) -> str:
        return f"Registry({self.kind}: {', '.join(self)})"


def require_interface(
    registry: Registry, name: str, part: Any, base: type | None = None, members: Mapping[str, str] | None = None
) -> None:
    """Refuse a component of the user's that lacks what the program will ask of it, before anything is run.

    Args:
        registry: registry of its kind.
        name: what YAML says.
        part: the built component.
        base: a class that it must be an instance of.
        members: attribute or method -> what it is, in words.
    Raises:
        RegistryError: with everything that is missing; ``docs/extending.md`` has the interfaces.
    """
    problems = []
    if base is not None and not isinstance(part, base):
        must = f"must be a {base.__module__}.{base.__qualname__}, as every {registry.kind} is"
        problems.append(Problem(registry.key, f"{name}: {type(part).__name__}", must, "See docs/extending.md."))
    for method, must in _wrong_arguments(type(part), base) if base is not None and _is_ours(base) else ():
        problems.append(
            Problem(registry.key, f"{name}: {type(part).__name__}.{method}", must, "See docs/extending.md.")
        )
    for member, meaning in (members or {}).items():
        if not hasattr(part, member):
            must = f"must have {member}: {meaning}"
            fix = f"Add it to {type(part).__qualname__}; docs/extending.md has the whole interface."
            problems.append(Problem(registry.key, name, must, fix))
    if problems:
        raise RegistryError(problems)


def _is_ours(base: type) -> bool:
    return base.__module__.partition(".")[0] == __name__.partition(".")[0]


def _wrong_arguments(cls: type, base: type) -> Iterator[tuple[str, str]]:
    """Yield each method of ``base`` that ``cls`` overrides with arguments with which it cannot be called."""
    for name, method in vars(base).items():
        mine = getattr(cls, name, method)
        if name.startswith("_") or not inspect.isfunction(method) or not inspect.isfunction(mine) or mine is method:
            continue
        parameters = inspect.signature(method).parameters.values()
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            continue  # the arguments are up to each class
        given = [p for p in parameters if p.default is p.empty and p.kind is not p.KEYWORD_ONLY]
        try:
            inspect.signature(mine).bind(*given)
        except TypeError:
            yield name, f"must take ({', '.join(p.name for p in given)})"


def _same_source(a: Any, b: Any) -> bool:
    """Check whether two objects are one definition, imported twice (a reload, or a module run as a script)."""
    return getattr(a, "__qualname__", a) == getattr(b, "__qualname__", b) and _file(a) == _file(b)


def _file(thing: Any) -> str:
    try:
        return inspect.getfile(thing)
    except TypeError:
        return repr(thing)


def load_plugins(imports: list[str]) -> list[Problem]:
    """Import the user's modules, then every module of the entry-point group, so that they register their components.

    Args:
        imports: module names from ``config.IMPORTS``.
    Returns:
        A problem for each installed plugin that cannot be loaded and is left out.
    Raises:
        RegistryError: a module cannot be found or imported, or takes a name that is taken.
    """
    for name in imports:
        try:
            import_module(name)
        except RegistryError:
            raise
        except (Exception, SystemExit) as error:  # whatever a user's module does: a sentence, not our stack
            raise RegistryError([_broken_import(name, error)]) from error
    broken = []
    for entry_point in entry_points(group=_ENTRY_POINT_GROUP):
        try:
            entry_point.load()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - other runs do not need the package
            broken.append(broken_plugin(entry_point, error))
    return broken


def _broken_import(name: str, error: BaseException) -> Problem:
    """Describe a module of ``config.IMPORTS`` that cannot be imported."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if not all(part.isidentifier() for part in name.split(".")):
        fix = "Write a module as an import statement does: my_package.my_module."
    # The module itself, or a package above it, is not there. A missing module that it imports in turn is an error in
    # it, and so the last case.
    elif missing and (name == missing or name.startswith(missing + ".")):
        fix = f"Put the folder that holds {name.split('.')[0]!r} on PYTHONPATH, install it, or correct the name."
    else:
        fix = f"It ends with {_error_text(error)}{_where(error)}. Correct the module."
    return Problem("config.IMPORTS", repr(name), "must name importable Python modules", fix)


def _error_text(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {text}' if text else ''}"


def _where(error: BaseException) -> str:
    """Return file and line of the error's innermost frame; a SyntaxError says it itself."""
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost frame says what failed; those around it are of the import machinery and ours.
    return f" at {frames[-1].filename}, line {frames[-1].lineno}" if not isinstance(error, SyntaxError) else ""


def broken_plugin(entry_point: EntryPoint, error: BaseException) -> Problem:
    """Describe an installed plugin that is left out."""
    package = entry_point.dist.name if entry_point.dist else "unknown"
    return Problem(
        f"plugin {entry_point.name!r}",
        entry_point.value,
        f"cannot be loaded and is left out ({_error_text(error)})",
        f"Correct or uninstall the package {package!r}.",
    )


_TRUNKS = "vissl_zero.models.trunks"
_HEADS = "vissl_zero.models.mlp_heads"
_METHODS = "vissl_zero.methods"
_OPTIM = "vissl_zero.optim"
_DATA = "vissl_zero.data"

METHODS = Registry(
    "method",
    "config.LOSS.name",
    {
        name: (f"{_METHODS}.{family}_keys", text)
        for family, methods in {
            "supervised": {
                "supervised": "Supervised cross-entropy.",
            },
            "segmentation": {
                "segmentation": "Segmentation: cross-entropy of the class of every pixel.",
            },
            "two_views": {
                "simclr": "SimCLR: NT-Xent between views, negatives from all ranks.",
                "moco_v2": "MoCo v2: InfoNCE against a queue of the teacher's keys.",
                "moco_v3": "MoCo v3: symmetric InfoNCE against the teacher's keys of the batch.",
                "byol": "BYOL: prediction of a teacher's projection of the other view.",
                "simsiam": "SimSiam: prediction of the other view, gradient stopped.",
                "barlow_twins": "Barlow Twins: cross-correlation of two views towards the identity.",
                "vicreg": "VICReg: variance, invariance and covariance of two views.",
            },
            "contrastive": {
                "nnclr": "NNCLR: the nearest neighbor of a view in a queue is the other view's positive.",
                "supcon": "SupCon: all views of all images of a class are positives of each other.",
            },
            "vicregl": {
                "vicregl": "VICRegL: VICReg of two or more views, and of places of their maps that match.",
            },
            "lejepa": {
                "lejepa": "LeJEPA: views agree, and their embeddings are an isotropic Gaussian.",
            },
            "visreg": {
                "visreg": "VISReg: views agree, and their embeddings have the scale and the shape of a Gaussian.",
            },
            "swav": {
                "swav": "SwAV: swapped prediction of Sinkhorn assignments across crops.",
                "swav_momentum": "SwAV with assignments from a teacher.",
            },
            "prototypes": {
                "deepcluster_v2": (
                    "DeepCluster v2: prediction of the k-means assignments of the last epoch's embeddings."
                ),
                "msn": "MSN: masked crops predict the prototypes that a teacher assigns to the full first crop.",
            },
            "distillation": {
                "distillation": "Distillation: the probabilities of a trained, frozen classifier.",
            },
            "feature_distillation": {
                "feature_distillation": "Feature distillation: the features of a teacher, of weights of any origin.",
            },
            "pretext": {
                "rotnet": "RotNet: predicts which of four rotations an image has.",
                "jigsaw": "Jigsaw: predicts the order of an image's shuffled tiles.",
                "npid": "NPID: each image is a class of its own; a memory bank of all images supplies the negatives.",
                "pirl": (
                    "PIRL: an image and its shuffled tiles share an embedding; a memory bank supplies the negatives."
                ),
            },
            "dino": {
                "dino": "DINO: self-distillation from a teacher that sees the large crops.",
                "ibot": "iBOT: DINO, and self-distillation of masked patches.",
                "dinov2": "DINOv2: DINO, iBOT and KoLeo, with Sinkhorn's centering.",
            },
            "dinov3": {
                "dinov3": (
                    "DINOv3: DINOv2, and patches whose similarities stay those of an earlier teacher (Gram anchoring)."
                ),
            },
            "masked_modeling": {
                "mae": "MAE: pixels of hidden patches from the few that are seen.",
                "simmim": "SimMIM: pixels of masked patches by one linear layer.",
                "maskfeat": "MaskFeat: histograms of oriented gradients of masked patches.",
                "ijepa": "I-JEPA: a teacher's embeddings of blocks from the patches around them.",
                "data2vec": "data2vec: a teacher's embeddings of masked patches, averaged over its last blocks.",
            },
        }.items()
        for name, text in methods.items()
    },
)
TRUNKS = Registry(
    "trunk",
    "config.MODEL.TRUNK.NAME",
    {
        "regnet": (f"{_TRUNKS}.regnet", "RegNet X/Y by name or by depth, w_0, w_a, w_m and group_width."),
        "resnet": (f"{_TRUNKS}.resnet", "ResNet 18 to 200, by depth and width multiplier."),
        "vision_transformer": (f"{_TRUNKS}.vision_transformer", "ViT by width, depth, heads and patch size."),
        "beit": (f"{_TRUNKS}.timm_trunk", "BEiT by width, depth, heads and patch size."),
        "xcit": (f"{_TRUNKS}.timm_trunk", "XCiT by width, depth, heads and patch size."),
        "convnext": (f"{_TRUNKS}.timm_trunk", "ConvNeXt by depth and width of each stage."),
        "swin_transformer": (f"{_TRUNKS}.timm_trunk", "Swin by width, and depth and heads of each stage."),
        "convit": (f"{_TRUNKS}.timm_trunk", "ConViT by width, depth, heads and number of gated blocks."),
        "efficientnet": (f"{_TRUNKS}.timm_trunk", "EfficientNet B0 to B7."),
        "mobilenetv3_tv": (f"{_TRUNKS}.timm_trunk", "MobileNet v3 of torchvision."),
        "mobilenetv3_timm": (f"{_TRUNKS}.timm_trunk", "MobileNet v3 of timm."),
        "resnet_sk": (f"{_TRUNKS}.resnet", "SimCLR v2's ResNet with selective kernels."),
        "alexnet_bvlc": (f"{_TRUNKS}.alexnet", "AlexNet as Caffe's BVLC has it."),
        "alexnet_colorization": (f"{_TRUNKS}.alexnet", "AlexNet of the colorization paper, on lightness alone."),
        "alexnet_deepcluster": (f"{_TRUNKS}.alexnet", "AlexNet of DeepCluster, on Sobel slopes."),
        "alexnet_jigsaw": (f"{_TRUNKS}.alexnet", "AlexNet of the jigsaw paper."),
        "alexnet_rotnet": (f"{_TRUNKS}.alexnet", "AlexNet of RotNet."),
        "timm": (f"{_TRUNKS}.timm_trunk", "Any timm model by name, written timm/<model>, without its classifier."),
        "torchvision": (
            f"{_TRUNKS}.torchvision_trunk",
            "Any torchvision classifier, torchvision/<model>, without its head.",
        ),
    },
)
# Configurations are resolved without torch, and ask this by name in a process of their own.
WEIGHTS_READERS = Registry(
    "reader of weights",
    "config.MODEL.WEIGHTS_INIT.PARAMS_FILE",
    {
        "network": ("vissl_zero.weights.reading", "The network that weights are of, as a run's configuration."),
        "teacher": ("vissl_zero.weights.reading", "The same, and how many features it has."),
    },
)
HEADS = Registry(
    "head",
    "config.MODEL.HEAD.PARAMS",
    {
        "mlp": (_HEADS, "Linear layers with optional batch norm, ReLU and dropout."),
        "eval_mlp": (_HEADS, "Batch norm over channels, then linear layers: VISSL's probe of a layer."),
        "identity": (_HEADS, "The features as they are."),
        "mobilenet_v3_head": (_HEADS, "MobileNet v3's classifier of two layers."),
        "mobilenet_v3_head_timm": (_HEADS, "The same with a convolution as the first layer."),
        "vision_transformer_head": (_HEADS, "A vision transformer's classifier of one or two layers."),
        "patch_predictor": (f"{_METHODS}.masked_modeling", "Predicts hidden patches, as MAE and I-JEPA do."),
        "chain": (_HEADS, "Heads one after another."),
        "siamese_head": (_HEADS, "Projector and predictor, as BYOL, SimSiam and MoCo v3 have them."),
    },
    of_methods="heads",
)
# None of its own: a loss always comes with its method.
LOSSES = Registry("loss", "config.LOSS.name", {}, of_methods="losses")
OPTIMIZERS = Registry(
    "base optimizer",
    "config.OPTIMIZER.base_optimizer.name",
    {
        "sgd": (f"{_OPTIM}.elementwise", "SGD with momentum, plain or Nesterov."),
        "adam": (f"{_OPTIM}.elementwise", "Adam, weight decay as an L2 term."),
        "adamw": (f"{_OPTIM}.elementwise", "Adam with decoupled weight decay."),
        "lion": (f"{_OPTIM}.elementwise", "Lion of timm: the sign of a running mean."),
        "adamw_schedule_free": (
            f"{_OPTIM}.elementwise",
            "AdamW without a schedule; an average of its weights is evaluated and exported.",
        ),
        "lars": (f"{_OPTIM}.elementwise", "SGD with layer-wise adaptive rates, as Barlow Twins has it."),
        "muon": (f"{_OPTIM}.whole_tensor", "Muon for matrices and convolutions, AdamW for the rest and for heads."),
        "lamb": (
            f"{_OPTIM}.whole_tensor",
            "LAMB of timm, without its own clipping by the norm of all gradients (that is ``ZERO.clip_grad``).",
        ),
        "adafactor": (f"{_OPTIM}.whole_tensor", "Adafactor of torch: second moments by row and column."),
        "normuon": (
            f"{_OPTIM}.whole_tensor",
            "Muon whose updates are normalized row by row, AdamW for the rest and for heads.",
        ),
        "shampoo": (f"{_OPTIM}.whole_tensor", "Shampoo at Adam's step sizes, on blocks of whole matrices."),
        "adamw_8bit": (
            f"{_OPTIM}.whole_tensor",
            "AdamW with state of 8 bits an element, by blocks of the full tensor.",
        ),
    },
)
SCHEDULERS = Registry(
    "schedule",
    "config.OPTIMIZER.param_schedulers.lr.name",
    {
        name: (f"{_OPTIM}.schedules", text)
        for name, text in {
            "constant": "One value throughout.",
            "cosine": "Half a cosine from start_value to end_value.",
            "cosine_warm_restart": "Cosines one after another, as VISSL has them.",
            "linear": "A straight line from start_value to end_value.",
            "multistep": "A value per milestone.",
            "step": "Equal steps through a list of values.",
            "composite": "Several schedules one after another.",
        }.items()
    },
)
DATA_SOURCES = Registry(
    "data source",
    "config.DATA.TRAIN.DATA_SOURCES",
    {
        "disk_folder": (f"{_DATA}.sources.disk", "Class folders, or one flat folder of unlabeled images."),
        "disk_filelist": (f"{_DATA}.sources.disk", "Image files named by .npy or text lists."),
        "webdataset": (f"{_DATA}.sources.packed", "Tars of images, as webdataset writes them."),
        "arrow": (f"{_DATA}.sources.packed", "Arrow files of Hugging Face's datasets, as save_to_disk writes them."),
        "parquet": (f"{_DATA}.sources.parquet", "Parquet files of images, as the Hugging Face hub has them."),
        "lmdb": (f"{_DATA}.sources.packed", "An LMDB database of image files."),
        "manifest": (f"{_DATA}.sources.manifest", "Image files and labels in a CSV or JSON lines table."),
        "hdf5": (f"{_DATA}.sources.hdf5", "Pixels or files in an HDF5 file."),
        "npy": (f"{_DATA}.sources.arrays", "Pixels in .npy arrays, mapped into memory."),
        "torchvision_dataset": (
            f"{_DATA}.sources.library_sets",
            "CIFAR, MNIST, STL-10, SVHN, Places and others.",
        ),
        "digits": (f"{_DATA}.sources.library_sets", "1,797 real scans of digits, 8x8, that come with scikit-learn."),
        "digit_scenes": (f"{_DATA}.sources.library_sets", "Digits on a canvas, with the class of every pixel."),
        "segmentation_folder": (f"{_DATA}.sources.segmentation", "Images and masks: images/ and masks/ of a folder."),
        "synthetic": (
            f"{_DATA}.sources.library_sets",
            "Seeded images with a learnable class structure, made on the fly.",
        ),
    },
)
TRANSFORMS = Registry(
    "transform",
    "config.DATA.TRAIN.TRANSFORMS",
    {
        "ImgPilToMultiCrop": (f"{_DATA}.transforms", "Random resized crops of several sizes."),
        "ImgReplicatePil": (f"{_DATA}.transforms", "Copies of an image, each augmented by itself."),
        "ImgPatchesFromTensor": (f"{_DATA}.transforms", "Tiles of an image, at random places of a grid."),
        "ImgPilToPatchesAndImage": (f"{_DATA}.transforms", "A crop of an image, and tiles of another."),
        "ImgPilMultiCropRandomApply": (
            f"{_DATA}.transforms",
            "Transforms with a probability for each crop.",
        ),
        "ImgPilRandomSolarize": (f"{_DATA}.transforms", "Solarization, with a probability, as VISSL has it."),
        "ImgPilRandomPhotometric": (f"{_DATA}.transforms", "PIRL's changes of color, with a probability."),
        "MNISTImgPil2RGB": (f"{_DATA}.transforms", "An RGB image, on a larger canvas if asked for."),
        "ImgPilToRawTensor": (f"{_DATA}.transforms", "A tensor with values from 0 to 255."),
        "ImgPil2LabTensor": (f"{_DATA}.transforms", "A Lab tensor, as the colorization paper has it."),
        "RandAugment": (f"{_DATA}.transforms", "Random operations, as VISSL or torchvision has them."),
        "ImgPilColorDistortion": (f"{_DATA}.transforms", "Color jitter and gray-scale, as SimCLR has it."),
        "ImgPilGaussianBlur": (f"{_DATA}.transforms", "Gaussian blur of a random radius, with a probability."),
        "ImgPilRandomStroke": (f"{_DATA}.transforms", "Thicker or thinner bright strokes, for scans of handwriting."),
    },
)
HOOKS = Registry(
    "hook",
    "config.HOOKS.EXTRA",
    {
        "extract_features": ("vissl_zero.evaluation.feature_files", "Writes the trunk's features of all images."),
        "feature_quality": ("vissl_zero.evaluation.feature_quality", "kNN, a linear probe and RankMe of the features."),
        "extract_label_predictions": (
            "vissl_zero.evaluation.feature_files",
            "Writes what the heads predict of all images.",
        ),
        "train_svm": (
            "vissl_zero.evaluation.linear_classifiers",
            "Trains linear SVMs on features; mean average precision.",
        ),
        "cluster_features_and_label": (
            "vissl_zero.evaluation.clustering",
            "Clusters features; images with clusters for labels.",
        ),
        "low_shot_test": ("vissl_zero.evaluation.linear_classifiers", "Logistic regressions on few images; top-1."),
        "extract_cluster": ("vissl_zero.evaluation.clustering", "Writes the prototype that each image is nearest to."),
        "instance_retrieval_test": (
            "vissl_zero.evaluation.retrieval_hook",
            "Finds images by their features; mean average precision.",
        ),
        "train_svm_low_shot": (
            "vissl_zero.evaluation.linear_classifiers",
            "The same on few images, drawn several times.",
        ),
        "learning_rate_range_test": (
            "vissl_zero.evaluation.learning_rate_range",
            "Raises the learning rate from step to step; vissl-zero lr-find runs it.",
        ),
        "weight_trace": ("vissl_zero.reporting.weight_files", "Saves the full weights after every step."),
    },
)
_LOGGERS = "vissl_zero.reporting.loggers"
LOGGERS = Registry(
    "logger",
    "config.HOOKS.LOGGERS",
    {
        "tensorboard": (f"{_LOGGERS}.tensorboard_events", "Event files for TensorBoard."),
        "csv": (f"{_LOGGERS}.csv_file", "One table, metrics.csv: a row per step."),
        "wandb": (f"{_LOGGERS}.wandb_run", "A run of Weights & Biases; offline unless WANDB_MODE=online."),
        "mlflow": (f"{_LOGGERS}.mlflow_run", "A run of MLflow, in mlflow.db or at MLFLOW_TRACKING_URI."),
        "trackio": (f"{_LOGGERS}.trackio_run", "A run of Trackio, in trackio/ or at TRACKIO_DIR."),
    },
)
STRATEGIES = Registry(
    "sharding engine",
    "config.ZERO.ENGINE",
    {
        "torch": ("vissl_zero.sharding.engines.torch.strategy", "Replicas at level 0, fully_shard at 1 to 3."),
        "fairscale": (
            "vissl_zero.sharding.engines.fairscale.strategy",
            "fairscale's OSS, ShardedDDP and FSDP, levels 1 to 3 (3 on CUDA only).",
        ),
    },
)

REGISTRIES: dict[str, Registry] = {
    "methods": METHODS,
    "trunks": TRUNKS,
    "heads": HEADS,
    "losses": LOSSES,
    "optimizers": OPTIMIZERS,
    "schedulers": SCHEDULERS,
    "sources": DATA_SOURCES,
    "transforms": TRANSFORMS,
    "hooks": HOOKS,
    "loggers": LOGGERS,
    "engines": STRATEGIES,
}
