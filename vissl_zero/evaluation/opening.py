"""The lines before a measurement: the recognized network, and the size and normalization of images."""

from __future__ import annotations

from dataclasses import asdict

from vissl_zero.checkpoint.named_weights import locate
from vissl_zero.data.split_pipeline import described_views
from vissl_zero.engine.hook import Run
from vissl_zero.evaluation.trunk import is_of_no_run
from vissl_zero.terminal import print_line
from vissl_zero.weights.network_name import network_name


def print_opening(run: Run) -> None:
    """Print the network, and size and normalization of images, on rank 0 of a run that does not train."""
    if run.is_main and run.plan.config.TEST_ONLY:
        print_line(f"network: {recognized(run)}")
        print_line(f"images: {described_views(run.plan.config.DATA)}. config.DATA.IMG_SIZE chooses another size.")


def recognized(run: Run) -> str:
    """Return the network's name, and the path of its weights if a run wrote them, for messages."""
    model = run.plan.config.MODEL
    name = model.WEIGHTS_INIT.PARAMS_FILE
    where = f", from {locate(name).path}" if name and not is_of_no_run(name) else ""
    return f"{network_name(asdict(model.TRUNK))}{where}"
