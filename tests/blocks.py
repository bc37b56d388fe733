"""Typed blocks from the plain data in which tests write them; a block stays as it is."""

from __future__ import annotations

from typing import Any, TypeVar

from vissl_zero.config.block_data import block_of
from vissl_zero.config.blocks.data import Data, Split
from vissl_zero.config.blocks.model_and_loss import FeatureEvalSettings, ModelConfig, Trunk
from vissl_zero.config.blocks.output import ImageRetrieval, Meters, Svm
from vissl_zero.config.run_config import RunConfig

T = TypeVar("T")


def _block(kind: type[T], given: Any) -> T:
    return given if isinstance(given, kind) else block_of(kind, given)


def run_block(given: Any) -> RunConfig:
    """Return the whole tree."""
    return _block(RunConfig, given)


def data_block(given: Any) -> Data:
    """Return ``DATA``."""
    return _block(Data, given)


def split_block(given: Any) -> Split:
    """Return ``DATA.TRAIN``."""
    return _block(Split, given)


def model_block(given: Any) -> ModelConfig:
    """Return ``MODEL``."""
    return _block(ModelConfig, given)


def trunk_block(given: Any) -> Trunk:
    """Return ``MODEL.TRUNK``."""
    return _block(Trunk, given)


def settings_block(given: Any) -> FeatureEvalSettings:
    """Return ``MODEL.FEATURE_EVAL_SETTINGS``."""
    return _block(FeatureEvalSettings, given)


def svm_block(given: Any) -> Svm:
    """Return ``SVM``."""
    return _block(Svm, given)


def meters_block(given: Any) -> Meters:
    """Return ``METERS``."""
    return _block(Meters, given)


def retrieval_block(given: Any) -> ImageRetrieval:
    """Return ``IMG_RETRIEVAL``."""
    return _block(ImageRetrieval, given)
