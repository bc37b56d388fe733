"""``MODEL``: trunk, heads, precision, recomputation, batch norm. ``LOSS``: a name and, under that name, its keys."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Any

from vissl_zero.config.blocks.sharding import FsdpConfig, ShardedDdpSetup
from vissl_zero.config.components import builtin_keys
from vissl_zero.config.components.trunks import (
    BeitConfig,
    ConvitLocality,
    ConvNextConfig,
    EfficientNetConfig,
    MobileNetConfig,
    RegNetConfig,
    ResNetConfig,
    ResNetSkConfig,
    SwinConfig,
    VisionTransformerConfig,
    XcitConfig,
)
from vissl_zero.config.constraints import choice, number
from vissl_zero.vissl.keys import with_vissl_keys

DEFAULT = "CrossEntropyLoss"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # what peft saves in a folder


def default_loss() -> dict[str, Any]:
    """Build the built-in losses with their defaults; typed nodes, so a wrong key or type is refused where it stands."""
    blocks = {name: _block(schema, f"LOSS.{name}")() for name, schema in builtin_keys("loss").items()}
    return {"name": DEFAULT, **blocks}


@cache
def _block(schema: type, path: str) -> type:
    """Make a dataclass of keys, and those inside it, with VISSL's other keys of the same blocks."""
    extra: list[tuple[str, type, Any]] = []
    for item in fields(schema):
        if isinstance(item.default_factory, type) and is_dataclass(item.default_factory):
            inner = _block(item.default_factory, f"{path}.{item.name}")
            extra.append((item.name, inner, field(default_factory=inner)))
    block = make_dataclass(schema.__name__, extra, bases=(schema,))
    # ``config.reference`` finds the sentences under fields by the module and the name of a class.
    block.__module__, block.__doc__ = schema.__module__, schema.__doc__
    return with_vissl_keys(path)(block)


@with_vissl_keys("MODEL.AMP_PARAMS.AMP_ARGS")
@dataclass
class AmpArgs:
    """``MODEL.AMP_PARAMS.AMP_ARGS``."""

    opt_level: str = "O1"
    """apex's level; only O1, which is what torch.autocast does."""


@with_vissl_keys("MODEL.AMP_PARAMS")
@dataclass
class AmpParams:
    """``MODEL.AMP_PARAMS``: compute the forward pass in half precision; weights and updates stay in float32."""

    USE_AMP: bool = False
    """Switch half precision on."""
    DTYPE: str = choice("bfloat16", "float16", default="bfloat16")
    """bfloat16 or float16; float16 needs loss scaling (ZERO.dynamic_loss_scale)."""
    AMP_TYPE: str = choice("apex", "pytorch", default="apex")
    """apex: AMP_ARGS.opt_level must be one that torch.autocast can stand for; pytorch has no levels: anything."""
    AMP_ARGS: AmpArgs = field(default_factory=AmpArgs)
    """apex's arguments."""


@dataclass
class Float8:
    """``MODEL.FLOAT8``: multiply in 8-bit floats in linear layers; weights and updates stay as they are."""

    USE_FLOAT8: bool = False
    """Round what linear layers multiply to float8, forward and backward; a GPU needs compute capability 8.9, and the
    CPU emulates it: the same numbers, no faster."""
    SCALES: str = choice("rows", "mx", default="rows")
    """rows: a scale for each token and each channel of a weight; mx: MXFP8, a power of two for every 32 elements of
    these, which needs a GPU of compute capability 10.0, or the CPU."""
    LAYERS: str = "^trunk[.](.*[.])?(qkv|proj|fc1|fc2)$"
    """Regular expression of the layers' full names, found anywhere in them; the default: the trunk's qkv, proj, fc1 and
    fc2, which are those of a transformer's blocks."""
    GATHER: bool = False
    """Level 3 sends the weights of these layers in float8: a byte an element and one a row, in place of two to eight an
    element. All levels round them so first, so that all train the same; 0 to 2 send what they send without it."""


@dataclass
class Lora:
    """``MODEL.LORA``: freeze the trunk and train low-rank adapters of its linear layers; heads train as ever."""

    USE_LORA: bool = False
    """Add a trained product of two thin matrices, times LORA_ALPHA / R, to the frozen weight of each target
    (https://arxiv.org/abs/2106.09685); needs pip install 'vissl-zero[lora]'."""
    R: int = number(8, least=1)
    """Rank of the product: rows of the first matrix, which starts at random, and columns of the second, at zero."""
    LORA_ALPHA: int = number(8, least=1)
    """Numerator of the factor of the product."""
    LORA_DROPOUT: float = number(0.0, least=0, below=1)
    """Share of a target's inputs that its adapter does not see in training."""
    TARGET_MODULES: Any = field(default_factory=lambda: ["attn.qkv", "attn.proj"])
    """Linear layers of the trunk, by the names of their library, as peft takes them: a list of names or ends of names,
    or a regular expression of whole names, such as '.*[.]attn[.]proj'."""
    ADAPTER_FOLDER: str = ""
    """Folder of peft, or of vissl-zero export --to peft, with adapters to begin with; R, LORA_ALPHA and TARGET_MODULES
    must be theirs, and WEIGHTS_INIT the weights under them."""


@dataclass
class RegNetBlock(RegNetConfig):
    """``MODEL.TRUNK.REGNET``: RegNet's own keys and where its activations are recomputed."""

    stage_checkpoints: list[list[int]] = field(default_factory=list)
    """Per stage, the blocks (counted from 1) that end a stretch to be recomputed; wins over EVERY_N_BLOCKS."""
    stage_checkpointing: list[list[bool]] = field(default_factory=list)
    """Per stage, whether each of those stretches is recomputed; a stage that is left out: all of its stretches."""


@with_vissl_keys("MODEL.TRUNK.VISION_TRANSFORMERS")
@dataclass
class VisionTransformerBlock(VisionTransformerConfig):
    """``MODEL.TRUNK.VISION_TRANSFORMERS``: the vision transformer's own keys."""


@with_vissl_keys("MODEL.TRUNK.BEIT")
@dataclass
class BeitBlock(BeitConfig):
    """``MODEL.TRUNK.BEIT``: BEiT's own keys."""


@with_vissl_keys("MODEL.TRUNK.XCIT")
@dataclass
class XcitBlock(XcitConfig):
    """``MODEL.TRUNK.XCIT``: XCiT's own keys."""


@with_vissl_keys("MODEL.TRUNK.EFFICIENT_NETS")
@dataclass
class EfficientNetBlock(EfficientNetConfig):
    """``MODEL.TRUNK.EFFICIENT_NETS``: EfficientNet's own keys."""


@with_vissl_keys("MODEL.TRUNK.MOBILE_NET")
@dataclass
class MobileNetBlock(MobileNetConfig):
    """``MODEL.TRUNK.MOBILE_NET``: MobileNet's own keys."""


@with_vissl_keys("MODEL.TRUNK.SWIN_TRANSFORMER")
@dataclass
class SwinBlock(SwinConfig):
    """``MODEL.TRUNK.SWIN_TRANSFORMER``: Swin's own keys."""


@with_vissl_keys("MODEL.TRUNK.CONVIT")
@dataclass
class ConvitBlock(ConvitLocality):
    """``MODEL.TRUNK.CONVIT``: ConViT's own keys."""


@with_vissl_keys("MODEL.TRUNK")
@dataclass
class Trunk:
    """``MODEL.TRUNK``: from images to features."""

    NAME: str = "resnet"
    """Trunk: regnet, resnet, vision_transformer, beit, xcit, convnext, swin_transformer, convit, efficientnet,
    mobilenetv3_tv, mobilenetv3_timm, resnet_sk, an alexnet_..., timm/<any timm model>, or one of your own; auto: that
    of the run that WEIGHTS_INIT.PARAMS_FILE is of."""
    REGNET: RegNetBlock = field(default_factory=RegNetBlock)
    """Keys of the regnet trunk."""
    RESNETS: ResNetConfig = field(default_factory=ResNetConfig)
    """Keys of the resnet trunk."""
    VISION_TRANSFORMERS: VisionTransformerBlock = field(default_factory=VisionTransformerBlock)
    """Keys of the vision_transformer trunk."""
    BEIT: BeitBlock = field(default_factory=BeitBlock)
    """Keys of the beit trunk."""
    XCIT: XcitBlock = field(default_factory=XcitBlock)
    """Keys of the xcit trunk."""
    CONVNEXT: ConvNextConfig = field(default_factory=ConvNextConfig)
    """Keys of the convnext trunk."""
    SWIN_TRANSFORMER: SwinBlock = field(default_factory=SwinBlock)
    """Keys of the swin_transformer trunk."""
    CONVIT: ConvitBlock = field(default_factory=ConvitBlock)
    """Keys of the convit trunk, which reads VISION_TRANSFORMERS too."""
    EFFICIENT_NETS: EfficientNetBlock = field(default_factory=EfficientNetBlock)
    """Keys of the efficientnet trunk."""
    MOBILE_NET: MobileNetBlock = field(default_factory=MobileNetBlock)
    """Keys of the mobilenetv3_tv and mobilenetv3_timm trunks."""
    RESNETS_SK: ResNetSkConfig = field(default_factory=ResNetSkConfig)
    """Keys of the resnet_sk trunk."""
    PARAMS: dict[str, Any] = field(default_factory=dict)
    """Keys of a timm/... trunk (use_mask_token, patch_drop_rate, drop_path_rate, model_args) or of one of your own."""


@with_vissl_keys("MODEL.HEAD")
@dataclass
class Head:
    """``MODEL.HEAD``: from features to what the loss takes."""

    PARAMS: list[Any] = field(default_factory=list)
    """Heads, each ["name", {key: value}]."""
    PARAMS_MULTIPLIER: float = number(1.0, above=0, most=1e6)
    """Multiplies the first weights and biases of the layers of mlp and eval_mlp."""
    BATCHNORM_EPS: float = number(1e-5, least=0, most=1)
    """Added to the variance in the heads' batch norms."""
    BATCHNORM_MOMENTUM: float = number(0.1, least=0, most=1, fix="Write 0.1, the usual value.")
    """Weight of the newest batch in the running statistics of the heads' batch norms."""


@with_vissl_keys("MODEL.SYNC_BN_CONFIG")
@dataclass
class SyncBnConfig:
    """``MODEL.SYNC_BN_CONFIG``: batch norm over the batches of several processes."""

    CONVERT_BN_TO_SYNC_BN: bool = False
    """Synchronize every batch norm, on any backend."""
    GROUP_SIZE: int = number(-1, least=-1)
    """Processes that share statistics; -1 and 0: all (VISSL reads -1 as those of one machine)."""


@with_vissl_keys("MODEL.ACTIVATION_CHECKPOINTING")
@dataclass
class ActivationCheckpointing:
    """``MODEL.ACTIVATION_CHECKPOINTING``: recompute activations in the backward pass instead of keeping them."""

    USE_ACTIVATION_CHECKPOINTING: bool = False
    """Recompute activations in the backward pass, at every ZeRO level."""
    EVERY_N_BLOCKS: int = number(1, least=1)
    """Recompute every n-th block of the trunk; 1 saves most memory."""
    BLOCKS: list[str] = field(default_factory=list)
    """Recompute these blocks alone, by full name (trunk.blocks.3); wins over EVERY_N_BLOCKS and stage_checkpoints.
    ZERO.LEVEL=fit writes them here."""


@dataclass
class GradClip:
    """``MODEL.GRAD_CLIP``: VISSL's switch for ``ZERO.clip_grad``."""

    USE_GRAD_CLIP: bool = False
    """Clip the global norm of the gradients to MAX_NORM."""
    NORM_TYPE: float = 2
    """Order of the norm; only 2."""
    MAX_NORM: float = number(1, above=0)
    """Largest global L2 norm."""


@dataclass
class WeightsInit:
    """``MODEL.WEIGHTS_INIT``: weights to begin with."""

    PARAMS_FILE: str = ""
    """A run folder, a checkpoint, safetensors, or a file of torch.save (VISSL's layouts, state dicts); never run. Or
    a folder of transformers or timm, or hf:<repo>, timm:<model>, torchvision:<model>, torchhub:<model>."""
    STATE_DICT_KEY_NAME: Any = "classy_state_dict"
    """Where a file of torch.save holds the weights: a list of keys, or dots between them; empty: detected."""
    SKIP_LAYERS: list[str] = field(default_factory=lambda: ["num_batches_tracked"])
    """Tensors whose name contains one of these keep their own initial values."""
    REMOVE_PREFIX: str = ""
    """Taken off the names in the file that begin with it."""
    APPEND_PREFIX: str = ""
    """Put before all names in the file, after REMOVE_PREFIX."""
    CONTINUE: bool = False
    """Continue pretraining: positions are resized to the trunk's images, a mask token that the file lacks starts anew,
    a fall of RankMe is told. A momentum teacher begins with the student's weights, as always. Not for a teacher."""


@with_vissl_keys("MODEL.FEATURE_EVAL_SETTINGS")
@dataclass
class FeatureEvalSettings:
    """``MODEL.FEATURE_EVAL_SETTINGS``: what of the model a benchmark trains and takes from WEIGHTS_INIT."""

    EVAL_MODE_ON: bool = False
    """Take the trunk alone from WEIGHTS_INIT; heads start from scratch."""
    FREEZE_TRUNK_ONLY: bool = False
    """Train the heads alone: the trunk keeps its weights and is in evaluation mode (needs EVAL_MODE_ON)."""
    FREEZE_TRUNK_AND_HEAD: bool = False
    """With EVAL_MODE_ON, train nothing, whatever TEST_ONLY says; kNN's and extracted features are the head's."""
    EXTRACT_TRUNK_FEATURES_ONLY: bool = False
    """With EVAL_MODE_ON, train nothing; kNN's and extracted features are the trunk's, or, as vectors, those of each
    layer of LINEAR_EVAL_FEAT_POOL_OPS_MAP."""
    EVAL_TRUNK_AND_HEAD: bool = False
    """With EVAL_MODE_ON, take the heads from WEIGHTS_INIT too; without it they are taken anyway."""
    ASSERT_HEAD_LAYER_SHAPE_INIT: bool = False
    """Refuse weights of a head that have another shape; off: the head starts anew, with a note."""
    LINEAR_EVAL_FEAT_POOL_OPS_MAP: list[Any] = field(default_factory=list)
    """With a frozen trunk, what each head is given: a list of [layer, [pooling, [its arguments]]], an entry per head.
    The layer by VISSL's name (res2, res5avg, lastCLS, concatCLS4) or by its path in the trunk (stages.1.0)."""
    SHOULD_FLATTEN_FEATS: bool = True
    """Make pooled maps of LINEAR_EVAL_FEAT_POOL_OPS_MAP vectors; off: heads are given maps (eval_mlp takes them)."""


@with_vissl_keys("MODEL")
@dataclass
class ModelConfig:
    """``MODEL``."""

    INPUT_TYPE: str = choice("rgb", "bgr", "lab", default="rgb")
    """What the trunk sees of the tensors that the transforms make: rgb, all; bgr, their channels in the other order
    (resnet, regnet); lab, the first channel of Lab tensors, the lightness (resnet, alexnet_colorization)."""
    IN_CHANNELS: int | None = number(None, least=1, most=1024)
    """Channels that the trunk's first layer sees; null: those of DATA.IN_CHANNELS, which a run notes here."""
    TRUNK: Trunk = field(default_factory=Trunk)
    """From images to features."""
    HEAD: Head = field(default_factory=Head)
    """From features to what the loss takes."""
    VIEWS_APART: bool = False
    """Pass each crop of an image through trunk and heads by itself. Batch norm then has its statistics view by view, as
    in BYOL, SimSiam, MoCo v3, Barlow Twins, and VICReg. Off: crops of one size go together, as in SimCLR and VISSL. For
    heads that take features alone (mlp, siamese_head, identity, or a chain of these)."""
    CHANNELS_LAST: bool = False
    """Give images to the trunk with the channels of a pixel side by side, as convolutions of GPUs compute them."""
    PACK_CROPS: bool = False
    """Run the crops of all sizes through each block of a vision transformer as one sequence of tokens, with attention
    within each image alone, as DINOv2 does (vision_transformer, timm's plain ones). The same results; fewer, larger
    products of matrices."""
    AMP_PARAMS: AmpParams = field(default_factory=AmpParams)
    """Half precision."""
    FLOAT8: Float8 = field(default_factory=Float8)
    """Products of linear layers in float8."""
    LORA: Lora = field(default_factory=Lora)
    """Low-rank adapters in place of the trunk's own weights."""
    SYNC_BN_CONFIG: SyncBnConfig = field(default_factory=SyncBnConfig)
    """Batch norm over several processes."""
    ACTIVATION_CHECKPOINTING: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    """Recompute activations."""
    SHARDED_DDP_SETUP: ShardedDdpSetup = field(default_factory=ShardedDdpSetup)
    """VISSL's switch for ZeRO level 2."""
    FSDP_CONFIG: FsdpConfig = field(default_factory=FsdpConfig)
    """VISSL's switch for ZeRO level 3, and what goes with it."""
    GRAD_CLIP: GradClip = field(default_factory=GradClip)
    """Gradient clipping."""
    WEIGHTS_INIT: WeightsInit = field(default_factory=WeightsInit)
    """Weights to begin with."""
    FEATURE_EVAL_SETTINGS: FeatureEvalSettings = field(default_factory=FeatureEvalSettings)
    """What a benchmark trains."""
    NON_TRAINABLE_PARAMS: list[str] = field(default_factory=list)
    """Full names of parameters that are never trained."""
    TEMP_FROZEN_PARAMS_ITER_MAP: list[Any] = field(default_factory=list)
    """Pairs [full parameter name, n]: not trained in the first n optimizer steps."""


@with_vissl_keys("DISTILLATION.TEACHER_MODEL")
@dataclass
class TeacherModel:
    """``DISTILLATION.TEACHER_MODEL``: the trained model that another one learns from, with the keys of MODEL."""

    TRUNK: Trunk = field(default_factory=Trunk)
    """As MODEL.TRUNK."""
    HEAD: Head = field(default_factory=Head)
    """As MODEL.HEAD."""
    WEIGHTS_INIT: WeightsInit = field(default_factory=WeightsInit)
    """As MODEL.WEIGHTS_INIT; trunk and heads must be complete."""
    INPUT_TYPE: str = choice("rgb", "bgr", "lab", default="rgb")
    """As MODEL.INPUT_TYPE."""


@with_vissl_keys("DISTILLATION")
@dataclass
class Distillation:
    """``DISTILLATION``: the teacher of dino_distillation_loss, and of a distillation_loss that names no run folder."""

    TEACHER_MODEL: TeacherModel = field(default_factory=TeacherModel)
    """The teacher."""
    CACHE_FEATURES: bool = False
    """Compute what a frozen teacher gives once for each view of an image and keep it on disk; needs
    DATA.AUGMENTATION_PERIOD."""
    CACHE_FOLDER: str = ""
    """Folder for it, which several runs may share; empty: teacher_features in the run folder."""
