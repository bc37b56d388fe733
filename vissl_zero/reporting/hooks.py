"""All hooks of a run, in the order in which they are called."""

from __future__ import annotations

from vissl_zero.config.blocks.output import EmaModel
from vissl_zero.config.programs import PROGRAMS
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.engine.hook import Hook
from vissl_zero.evaluation.accuracy import AccuracyHook
from vissl_zero.evaluation.knn_hook import KnnHook
from vissl_zero.evaluation.online_probe_hook import OnlineProbeHook
from vissl_zero.registry import HOOKS, require_interface
from vissl_zero.reporting.collapse import CollapseWatch
from vissl_zero.reporting.display import Display
from vissl_zero.reporting.memory_kinds import PeakMemory
from vissl_zero.reporting.metrics_file import MetricsFile
from vissl_zero.reporting.opening import Opening
from vissl_zero.reporting.report_image import ReportImage
from vissl_zero.reporting.summary import Summary
from vissl_zero.reporting.tensorboard import TensorBoard
from vissl_zero.reporting.weight_average import WeightAverageHook
from vissl_zero.reporting.weights_file import BestWeights, WeightsFile


def build_hooks(plan: ResolvedRun) -> list[Hook]:
    """The hooks a configuration asks for. Every rank builds the same list: some hooks are collective.

    The display comes first, so that something is seen before the first evaluation and its last frame stands above what
    the others print at the end; the file of metrics before anything that may fail; what adds results (evaluation, the
    user's hooks, peak memory) before what reports them.

    Raises:
        RegistryError: config.HOOKS.EXTRA names an unknown hook.
    """
    options = plan.config["HOOKS"]
    knn = KnnHook(plan)
    hooks: list[Hook] = [Opening(), Display(), MetricsFile(), CollapseWatch(), knn, AccuracyHook()]
    if plan.config["ONLINE_PROBE"]["USE_PROBE"]:
        hooks.append(OnlineProbeHook())
    if plan.config["CHECKPOINT"]["SAVE_BEST"]:
        hooks.append(BestWeights())
    program = PROGRAMS.get(plan.config["PROGRAM"])
    for name in dict.fromkeys([*([program] if program else []), *options["EXTRA"]]):
        hooks.append(HOOKS.get(name).build())
        require_interface(HOOKS, name, hooks[-1], base=Hook)
    if options["TENSORBOARD_SETUP"]["USE_TENSORBOARD"]:
        hooks.append(TensorBoard())
    if (average := EmaModel(**options.get("EMA_MODEL", {}))).SAVE_EMA_MODEL:
        hooks.append(WeightAverageHook(average))
    if not plan.config["TEST_ONLY"]:
        hooks.append(WeightsFile())
    return [*hooks, PeakMemory(), Summary(), ReportImage(knn)]
