"""``DATA``: images, batches, transforms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vissl_zero.config.constraints import choice, number
from vissl_zero.vissl.keys import with_vissl_keys

if TYPE_CHECKING:
    Texts = list[str]
else:
    Texts = Any  # a plain text is a list of one: `compose` makes it one, and refuses what is neither


TEXTS: dict[str, Any] = {"texts": True}  # metadata of such a field
# Names under which crops are collated by resolution, and the one that mixes images.
_COLLATORS = (
    "default_collate",
    "multicrop_collator",
    "simclr_collator",
    "moco_collator",
    "siamese_collator",
    "patch_and_image_collator",
    "ibot_multicrop_masking_collator",
)
MIXING_COLLATOR = "cutmixup_collator"


@dataclass
class DataLimitSampling:
    """``DATA_LIMIT_SAMPLING``: which images DATA_LIMIT takes."""

    SEED: int = number(0, least=0, most=2**32 - 1)
    """Seed of the draw; every split and every run with it draws the same images."""
    IS_BALANCED: bool = False
    """As many images of each class, or one more."""
    SKIP_NUM_SAMPLES: int = number(0, least=0)
    """Leave out this many images, drawn first: two runs that share a seed then have none in common."""


@dataclass
class MixingConfig:
    """``COLLATE_FUNCTION_PARAMS`` of ``cutmixup_collator``, as VISSL and timm have them."""

    mixup_alpha: float = number(1.0, least=0, most=2)
    """Parameter of the Beta distribution of mixup's shares; 0: no mixup."""
    cutmix_alpha: float = number(0.0, least=0, most=2)
    """Parameter of the Beta distribution of CutMix's areas; 0: no CutMix."""
    cutmix_minmax: list[float] | None = None
    """Least and largest side of CutMix's box over the image's, in place of cutmix_alpha."""
    prob: float = number(1.0, least=0, most=1)
    """Probability of mixing at all."""
    switch_prob: float = number(0.5, least=0, most=1)
    """Probability of CutMix where both are on."""
    mode: str = choice("batch", "pair", "elem", default="batch")
    """What shares a draw: the images of a process's micro-batch, two images that are mixed with each other, nothing."""
    correct_lam: bool = True
    """CutMix: labels are mixed by the area that was pasted, where the box is cut by the border."""
    label_smoothing: float = number(0.1, least=0, below=1)
    """Share of each label that is spread over all classes."""
    num_classes: int = number(1000, least=1, most=2**31)
    """Classes; as many as the head has outputs. Only supervised losses have labels to mix."""
    ssl_method: str = choice("", "swav", "simclr", "moco", default="")
    """Whose loss sees the mixed images, without labels: each crop is mixed by itself; empty: a supervised one."""


@with_vissl_keys("DATA.TRAIN")
@dataclass
class Split:
    """``DATA.TRAIN`` and ``DATA.TEST``."""

    DATA_SOURCES: Texts = field(default_factory=list, metadata=TEXTS)
    """One data source: disk_folder, digits, synthetic, or one of your own; empty with DATA_PATHS: disk_folder."""
    DATA_PATHS: Texts = field(default_factory=list, metadata=TEXTS)
    """Folders with images; several are joined. In place of a recipe's digits, they imply disk_folder."""
    DATASET_NAMES: Texts = field(default_factory=list, metadata=TEXTS)
    """Data sets by name: torchvision's for torchvision_dataset; without DATA_PATHS, those of a dataset catalog."""
    REMOVE_IMG_PATH_PREFIX: str = ""
    """Start of the paths in a disk_filelist that NEW_IMG_PATH_PREFIX replaces."""
    NEW_IMG_PATH_PREFIX: str = ""
    """What replaces REMOVE_IMG_PATH_PREFIX."""
    SOURCE_PARAMS: dict[str, Any] = field(default_factory=dict)
    """Keys of a data source of your own."""
    LABEL_SOURCES: Texts = field(default_factory=list, metadata=TEXTS)
    """Where labels come from: [disk_folder] (the class folders) or [disk_filelist] (LABEL_PATHS)."""
    LABEL_PATHS: Texts = field(default_factory=list, metadata=TEXTS)
    """Files of integer labels (.npy), one per DATA_PATHS."""
    LABEL_TYPE: str = choice("standard", "sample_index", "zero", default="standard")
    """standard: the class of the image; sample_index: its number; zero: always 0."""
    DEFAULT_GRAY_IMG_SIZE: int = number(224, least=1, most=65536)
    """Side in pixels of images that a source makes itself."""
    BATCHSIZE_PER_REPLICA: int = number(256, least=1, most=2**31)
    """Source images per process and micro-batch."""
    DROP_LAST: bool = False
    """Leave out the last step of an epoch if it would be smaller than the others."""
    DATA_LIMIT: int = number(-1, least=1, also=(-1,), fix="Write -1 for all images.")
    """Use this many images, drawn once; -1: all."""
    DATA_LIMIT_SAMPLING: DataLimitSampling = field(default_factory=DataLimitSampling)
    """Which images DATA_LIMIT takes."""
    COLLATE_FUNCTION: str = choice(*_COLLATORS, MIXING_COLLATOR, default="default_collate")
    """Under every name, crops are collated by resolution; cutmixup_collator also mixes images (mixup, CutMix), and the
    labels of a supervised loss."""
    COLLATE_FUNCTION_PARAMS: dict[str, Any] = field(default_factory=dict)
    """Keys of cutmixup_collator: mixup_alpha, cutmix_alpha, cutmix_minmax, prob, switch_prob, mode, correct_lam,
    label_smoothing, num_classes, ssl_method."""
    TRANSFORMS: list[Any] = field(default_factory=list)
    """From an image to its crops: a list of {name: ..., <argument>: ...}, our own transforms or torchvision's."""


@with_vissl_keys("DATA")
@dataclass
class Data:
    """``DATA``."""

    TRAIN: Split = field(default_factory=Split)
    """What is trained on."""
    TEST: Split = field(default_factory=Split)
    """What is evaluated on; without a source, part of TRAIN."""
    IMG_SIZE: int | None = number(None, least=1, most=65536)
    """Side in pixels of the largest training crop: all sizes in TRANSFORMS are scaled with it; null: as written."""
    IN_CHANNELS: int = number(3, least=1, most=1024)
    """Channels of the images. 3: RGB of 8 bits; any other number: gray of 16 bits, files of several
    channels or pages, and arrays, at full precision, for transforms that move pixels."""
    AUGMENTATION_PERIOD: int | None = number(None, least=1)
    """Epochs after which the random crops and colors of each training image repeat; 1: every epoch shows the same;
    null: they never repeat."""
    BACKEND: str = choice("pil", "fast", default="pil")
    """What decodes and transforms images. pil: Pillow, as VISSL; fast: arrays of 8 bits (simplejpeg, torch, OpenCV),
    several times faster; crops have the same boxes. pip install vissl-zero[fast]."""
    AUGMENT_ON: str = choice("workers", "device", default="workers")
    """Where training images change colors, are mirrored, blurred and normalized. workers: before a batch is given away;
    device: on whole batches of 8 bits, with the same draws; needs BACKEND fast. Workers crop and resize either way."""
    EXIF: str = choice("ignore", "apply", default="ignore")
    """ignore: read pixels as they are stored, as VISSL does; apply: turn an image as its camera noted."""
    BACKGROUND: str = choice("stored", "white", "gray", "black", default="stored")
    """Color behind transparent pixels; stored: the color that the file has beneath them, as VISSL takes it."""
    MAX_PIXELS: int = number(89_478_485, least=1, most=2**31)
    """Most pixels of an image; larger ones count as broken. Pillow's limit for decompression bombs."""
    NUM_DATALOADER_WORKERS: int = number(4, least=0, most=1024)
    """Loader processes per training process; 0: images are loaded in the training process."""
    WORKER_TIMEOUT_S: float | None = number(None, above=0)
    """Seconds after which a loader process that gives no micro-batch counts as lost; null: half of
    DISTRIBUTED.TIMEOUT_S, so that it is named before other ranks give up."""
    PIN_MEMORY: bool = True
    """Load batches into page-locked memory, which copies faster to a GPU; no effect without one."""
    ON_BROKEN_IMAGE: str = choice("raise", "skip", default="raise")
    """raise: stop, naming the file; skip: name it and take another image in its place, always the same one."""


def split_of(data_cfg: Data, split: str) -> Split:
    """Return the block of a split, "TRAIN" or "TEST"."""
    return data_cfg.TRAIN if split == "TRAIN" else data_cfg.TEST
