"""Labels as a data set writes them: the order of their classes, and the rule that every image has one, or none has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vissl_zero.data.source import SourceRequest
from vissl_zero.errors import DataError, did_you_mean

MIXED = "some labels are names and others numbers"


def unequal_labels(paths: Sequence[str], what: str) -> DataError:
    """Return the error for images whose labels differ in kind; ``what`` is the clause that says how."""
    return DataError(f"{', '.join(paths)}: {what}. Give every image the same kind of label, or none.")


def require_every_label(unlabeled: int, images: int, paths: Sequence[str]) -> None:
    """Check that all images have a label, or none has. Raises DataError."""
    if 0 < unlabeled < images:
        raise unequal_labels(paths, f"{unlabeled:,} of {images:,} images have no label")


def joined(parts: Sequence[np.ndarray], paths: Sequence[str]) -> np.ndarray:
    """Join the labels of several files, (N,) each. Raises DataError where some are numbers and others names."""
    if len({part.dtype.kind for part in parts}) > 1:
        raise unequal_labels(paths, MIXED)
    return np.concatenate(parts)


def label_text(label: Any, place: str) -> str:
    """Return a label as text: a name, or a whole number; "" for None.

    Args:
        label: value of JSON.
        place: its position, for messages.
    Raises:
        DataError: it is of another type.
    """
    if label is None:
        return ""
    if type(label) not in (str, int):
        raise DataError(f"{place} has {label!r} for a label. Write names or whole numbers.")
    return str(label).strip()


def ordered_classes(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of classes, each once, in ascending order: as numbers if all are, 2 before 10."""
    names = {*names}
    are_numbers = all(name.isdecimal() and name.isascii() for name in names)
    return tuple(sorted(names, key=int if are_numbers else str))


def class_numbers(names: Iterable[str], classes: Sequence[str], whose: str, request: SourceRequest) -> dict[str, int]:
    """Return the number of each class.

    Args:
        names: classes of the images.
        classes: all classes, by number.
        whose: what lists ``classes``, for messages.
        request: request of the source.
    Raises:
        DataError: some of ``names`` are not among ``classes``.
    """
    number = {name: index for index, name in enumerate(classes)}
    if unknown := sorted({*names} - {*number}):
        hint = did_you_mean(unknown[0], classes)
        raise DataError(f"{request.key} has labels that {whose} does not have: {', '.join(unknown[:10])}.{hint}")
    return number


def numbered(
    labels: np.ndarray, classes: Sequence[str], whose: str, request: SourceRequest
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the class numbers of labels that are names, and the names of the classes.

    Args:
        labels: (N,) text.
        classes: classes that the data set lists; empty: the names that occur, in ascending order.
        whose: what lists ``classes``, for messages.
        request: request of the source. Its classes, those of TRAIN, come before ``classes``.
    Raises:
        DataError: a label is none of the classes.
    """
    # Each label once: a million images share some thousand classes.
    names, at = np.unique(labels, return_inverse=True)
    known = tuple(request.class_names or classes) or ordered_classes(names.tolist())
    number = class_numbers(names.tolist(), known, "DATA.TRAIN" if request.class_names else whose, request)
    return np.array([number[name] for name in names.tolist()], np.int64)[at], known
