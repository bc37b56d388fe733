"""The same recipe on a GPU: counted as skipped where there is none."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.gpu.runs import losses
from tests.unit.data.test_device_augmentation import END, SEVERAL, noted
from vissl_zero.checkpoint.snapshot import HostMemory
from vissl_zero.data.decode import Decoder
from vissl_zero.data.fast.device_pipeline import DevicePipeline
from vissl_zero.data.fast.pipeline import build_fast_pipeline
from vissl_zero.sharding.model.float8 import Float8Linear, MxLinear
from vissl_zero.sharding.state.saved_state import Part

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(280),
]
RECIPE, STEPS = "quickstart/swav_digits", "config.TRAINER.MAX_STEPS=6"
DOUBLE = "config.TRAINER.DTYPE=float64"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("gpu") / "run", RECIPE, STEPS, "config.ZERO.LEVEL=0", DOUBLE)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_levels_are_equal_in_float64(level, reference, tmp_path):
    found = losses(tmp_path / "run", RECIPE, STEPS, f"config.ZERO.LEVEL={level}", DOUBLE)
    assert found == pytest.approx(reference, abs=1e-10)


@pytest.mark.parametrize("level", [1, 2])
def test_fairscale_is_equal_in_float64(level, reference, tmp_path):
    engine = [f"config.ZERO.LEVEL={level}", "config.ZERO.ENGINE=fairscale"]
    assert losses(tmp_path / "run", RECIPE, STEPS, *engine, DOUBLE) == pytest.approx(reference, abs=1e-10)


def test_level_3_of_fairscale_is_close_in_float32(reference, tmp_path):
    engine = ["config.ZERO.LEVEL=3", "config.ZERO.ENGINE=fairscale"]
    assert losses(tmp_path / "run", RECIPE, STEPS, *engine) == pytest.approx(reference, rel=1e-3)


@pytest.mark.parametrize("what", [["optimizer"], ["optimizer", "param"]], ids=str)
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_tiers_are_equal_in_float64(place, what, reference, tmp_path):
    keys = [f"config.ZERO.offload_{kind}_config.device={place}" for kind in what]
    keys += [f"config.ZERO.offload_{kind}_config.nvme_path={tmp_path}" for kind in what if place == "nvme"]
    found = losses(tmp_path / "run", RECIPE, STEPS, "config.ZERO.LEVEL=3", DOUBLE, *keys)
    assert found == pytest.approx(reference, abs=1e-10)


@pytest.mark.parametrize("level", [0, 3])
def test_crops_in_passes_are_equal_in_float64(level, tmp_path):
    words = ["digits/ibot", "config.TRAINER.MAX_STEPS=4", f"config.ZERO.LEVEL={level}", DOUBLE]
    plain = losses(tmp_path / "plain", *words)
    assert losses(tmp_path / "passes", *words, "config.TRAINER.CROP_PASSES=4") == pytest.approx(plain, rel=1e-10)


SIZES = "total_num_crops: 4, size_crops: [16, 8], num_crops: [2, 2], crop_scales: [[0.7, 1.0], [0.3, 0.7]]"
TWO_SIZES = f"config.DATA.TRAIN.TRANSFORMS=[{{name: ImgPilToMultiCrop, {SIZES}}}, {{name: ToTensor}}]"


@pytest.mark.parametrize("level", [0, 3])
def test_packed_crops_are_equal_in_float64(level, tmp_path):
    words = ["digits/ibot", TWO_SIZES, "config.TRAINER.MAX_STEPS=4", f"config.ZERO.LEVEL={level}", DOUBLE]
    plain = losses(tmp_path / "plain", *words)
    assert losses(tmp_path / "packed", *words, "config.MODEL.PACK_CROPS=true") == pytest.approx(plain, rel=1e-10)


@pytest.mark.parametrize("is_packing", [False, True])
def test_passes_without_rows_of_a_size_take_the_kernels_of_bfloat16(is_packing, tmp_path):
    """cuDNN's attention gives None for no rows."""
    amp = ["config.MODEL.AMP_PARAMS.USE_AMP=true", "config.MODEL.AMP_PARAMS.DTYPE=bfloat16"]
    words = ["digits/ibot", TWO_SIZES, "config.TRAINER.MAX_STEPS=2", *amp, "config.TRAINER.CROP_PASSES=4"]
    assert len(losses(tmp_path / "run", *words, f"config.MODEL.PACK_CROPS={is_packing}")) == 2


@pytest.mark.parametrize("level", [0, 3])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(level, reference, tmp_path):
    words = [f"config.ZERO.LEVEL={level}", DOUBLE, "config.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY=3"]
    assert len(losses(tmp_path / "run", RECIPE, *words, "config.TRAINER.MAX_STEPS=3")) == 3
    assert losses(tmp_path / "run", RECIPE, *words, STEPS) == pytest.approx(reference, abs=1e-10)


@pytest.mark.parametrize("level", [0, 3])
def test_deterministic_runs_give_the_same_bits(level, tmp_path):
    words = [f"config.ZERO.LEVEL={level}", STEPS, "config.TRAINER.DETERMINISTIC=true"]
    assert losses(tmp_path / "a", RECIPE, *words) == losses(tmp_path / "b", RECIPE, *words)


def test_the_gpu_computes_what_the_cpu_does(reference, tmp_path):
    found = losses(tmp_path / "run", RECIPE, STEPS, "config.ZERO.LEVEL=0", DOUBLE, device="cpu")
    assert found == pytest.approx(reference, abs=1e-9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", [0, 3])
def test_half_precision_trains(dtype, level, reference, tmp_path):
    amp = ["config.MODEL.AMP_PARAMS.USE_AMP=true", f"config.MODEL.AMP_PARAMS.DTYPE={dtype}"]
    found = losses(tmp_path / "run", RECIPE, STEPS, f"config.ZERO.LEVEL={level}", *amp)
    assert found[0] == pytest.approx(reference[0], rel=0.05)


def test_a_save_copies_what_was_computed_before_it_while_the_next_step_computes():
    large = torch.randn(4096, 4096, device="cuda")
    state = torch.zeros(2**24, device="cuda")
    part = Part("model/a", state.shape, 0, state.numel(), state.dtype, lambda: state)
    memory = HostMemory(torch.device("cuda"))
    with ThreadPoolExecutor(1) as thread:
        for value in (1.0, 2.0):  # the second time into memory that is there
            for _ in range(20):
                large = (large @ large).tanh()
            state.fill_(value)  # queued behind all of that
            memory.begin()
            copy = thread.submit(memory.copy, [part])
            for _ in range(20):
                large = (large @ large).tanh()
            (copied,) = copy.result()  # what the next update waits for
            state.fill_(-1.0)
            assert bool((copied.read() == value).all())


FLOAT8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="a GPU without float8"
)


@FLOAT8
@pytest.mark.parametrize("kind", [Float8Linear, MxLinear])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 37, 256])
def test_products_of_float8_are_the_emulated_ones(dtype, tokens, kind):
    """Forward and backward, against the same layer on the CPU; the kernel rounds its sums to bfloat16."""
    if torch.cuda.get_device_capability() < kind.least_capability:
        pytest.skip("a GPU without this float8")
    assert_as_on_the_cpu(kind(96, 160), dtype, tokens)


def assert_as_on_the_cpu(layer: torch.nn.Linear, dtype: torch.dtype, tokens: int) -> None:
    """Compare output and gradients of a float8 layer on both devices."""
    torch.manual_seed(0)
    x, grad = torch.randn(tokens, layer.in_features), torch.randn(tokens, layer.out_features)
    found = []
    for device in ("cpu", "cuda"):
        own = copy.deepcopy(layer).to(device, dtype)
        given = x.detach().to(device, dtype).clone().requires_grad_()
        output = own(given)
        output.backward(grad.to(device, dtype))
        found.append([tensor.detach().float().cpu() for tensor in (output, given.grad, own.weight.grad)])
    for emulated, real in zip(*found, strict=True):
        assert (real - emulated).norm() <= 2**-7 * emulated.norm()


@FLOAT8
def test_widths_that_the_kernel_does_not_take_are_emulated():
    assert_as_on_the_cpu(Float8Linear(24, 10), torch.float32, tokens=5)


VIT_IN_FLOAT8 = [
    "config.MODEL.TRUNK.NAME=vision_transformer",
    "config.MODEL.TRUNK.VISION_TRANSFORMERS={IMAGE_SIZE: 16, PATCH_SIZE: 8, NUM_LAYERS: 2, NUM_HEADS: 2, "
    "HIDDEN_DIM: 32, MLP_DIM: 64}",
    "config.MODEL.HEAD.PARAMS=[[swav_head, {dims: [32, 16], num_clusters: [10]}]]",
    "config.MODEL.FLOAT8.USE_FLOAT8=true",
]


@FLOAT8
@pytest.mark.parametrize("level", [0, 3])
def test_float8_trains_under_autocast(level, tmp_path):
    """As on the CPU, where the products are emulated; bfloat16 rounds differently on the two."""
    words = [STEPS, f"config.ZERO.LEVEL={level}", *VIT_IN_FLOAT8, "config.MODEL.AMP_PARAMS.USE_AMP=true"]
    found = losses(tmp_path / "gpu", RECIPE, *words)
    assert found == pytest.approx(losses(tmp_path / "cpu", RECIPE, *words, device="cpu"), rel=0.05)


def test_augmentation_on_the_device_is_that_on_the_cpu():
    pipeline = build_fast_pipeline(
        [{"name": "Resize", "size": [61, 53]}, *SEVERAL, *END], "t", Decoder(), DevicePipeline
    )
    crops = noted(pipeline, 24)
    changes, pixels = pipeline.changes([crop.noted for crop in crops]), pipeline.stacked(crops)
    found = changes.each(torch.Tensor.cuda)(pixels.cuda()).cpu()
    assert 255 * (found - changes(pixels)).abs().mean() < 1e-3
