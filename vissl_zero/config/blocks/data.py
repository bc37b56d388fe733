"""``DATA``: images, batches, transforms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vissl_zero.config.vissl_block import with_vissl_keys


@with_vissl_keys("DATA.TRAIN")
@dataclass
class Split:
    """``DATA.TRAIN`` and ``DATA.TEST``."""

    DATA_SOURCES: list[str] = field(default_factory=list)
    """One data source: disk_folder, digits, synthetic or one of your own; empty: no such split."""
    DATA_PATHS: list[str] = field(default_factory=list)
    """Folders of a disk_folder source; several are joined."""
    SOURCE_PARAMS: dict[str, Any] = field(default_factory=dict)
    """Keys of a data source of your own."""
    LABEL_SOURCES: list[str] = field(default_factory=list)
    """Where labels come from: [disk_folder] (the class folders) or [disk_filelist] (LABEL_PATHS)."""
    LABEL_PATHS: list[str] = field(default_factory=list)
    """Files of integer labels (.npy), one per DATA_PATHS."""
    LABEL_TYPE: str = "standard"
    """standard: the class of the image; sample_index: its number; zero: always 0."""
    DEFAULT_GRAY_IMG_SIZE: int = 224
    """Side in pixels of images that a source makes itself."""
    BATCHSIZE_PER_REPLICA: int = 256
    """Source images per process and micro-batch."""
    DROP_LAST: bool = False
    """Leave out the last step of an epoch if it would be smaller than the others."""
    DATA_LIMIT: int = -1
    """Use this many images, drawn once; -1: all."""
    TRANSFORMS: list[Any] = field(default_factory=list)
    """From an image to its crops: a list of {name: ..., <argument>: ...}, our own transforms or torchvision's."""


@with_vissl_keys("DATA")
@dataclass
class Data:
    """``DATA``."""

    TRAIN: Split = field(default_factory=lambda: Split(DATA_SOURCES=["digits"]))
    """What is trained on."""
    TEST: Split = field(default_factory=Split)
    """What is evaluated on; without a source, part of TRAIN."""
    NUM_DATALOADER_WORKERS: int = 4
    """Loader processes per training process; 0: images are loaded in the training process."""
    PIN_MEMORY: bool = True
    """Load batches into page-locked memory, which copies faster to a GPU; no effect without one."""
    ON_BROKEN_IMAGE: str = "raise"
    """raise: stop, naming the file; skip: name it and take another image in its place, always the same one."""
