"""The online probe's accuracy: on what the model trains on, and on images it was not trained on."""

from __future__ import annotations

from typing import Any

import torch

from vissl_zero.data.eval_images import build_eval_images, require_evaluation
from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.evaluation.accuracy import accuracies_of


class OnlineProbeHook(Hook):
    """Steps the probe with the model and measures it on TEST's images, every EVERY_NUM_EPOCHS epochs and at the end.

    Adds to the results: ``probe_top1_latest`` while it trains, ``probe_top1`` at the end, ``probe_top1_by_step``
    ([step, top-1] each), and ``probe_top1_train``, of the newest epoch's training views (0 to 1).
    """

    def __init__(self) -> None:
        self._curve: list[list[float]] = []
        self._seen = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        """The curve so far."""
        return {"curve": self._curve}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._curve = [list(point) for point in state["curve"]]

    def on_start(self, run: Run) -> None:
        require_evaluation(run.plan.config["DATA"], run.plan.seed)

    def on_epoch_start(self, run: Run) -> None:
        self._seen = torch.zeros(2, dtype=torch.float64, device=run.device)

    def on_step(self, run: Run, step: Step) -> None:
        if run.probe is not None:
            self._seen += torch.stack(run.probe.step())

    def on_epoch_end(self, run: Run) -> None:
        every = run.plan.config["ONLINE_PROBE"]["EVERY_NUM_EPOCHS"]
        count, right = self._seen.tolist()
        run.results["probe_top1_train"] = right / count if count else None
        if every and (run.epoch + 1) % every == 0 and run.step < run.num_steps:  # on_end measures the last
            run.results["probe_top1_latest"] = self._measure(run)

    def on_end(self, run: Run) -> None:
        run.results.pop("probe_top1_latest", None)
        if run.num_steps:
            run.results["probe_top1"] = self._measure(run)

    def _measure(self, run: Run) -> float | None:
        """Top-1 on TEST's images as the probe is now, which joins the curve. Collective."""
        _, images = build_eval_images(run.plan.config["DATA"], run.plan.seed)
        probe, model = run.probe, run.sharded.model
        if images is None or probe is None:
            return None
        found = accuracies_of(
            run,
            images,
            lambda batch: [probe.scores(*model(batch, features_only=True))],
            num_classifiers=1,
            counts_label=lambda labels: labels >= 0,
        )
        if not found:
            return None
        self._curve.append([run.step, found[0].top1])
        run.results["probe_top1_by_step"] = [list(point) for point in self._curve]
        return found[0].top1
