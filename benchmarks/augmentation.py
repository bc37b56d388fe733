"""Images per second of one core: torchvision v2, lightly, ours on Pillow, ours fast.

    python benchmarks/augmentation.py [--views swav224|cifar] [--rounds 7] [--files FOLDER]

One thread. Every round runs all pipelines on the same files, one after the other, in an order that changes; figures are
of processor time, medians and quartiles over the rounds. Without --files: scikit-learn's two photographs, cut into 24
JPEGs of 500 x 375 pixels (quality 90), as ImageNet's are on average. benchmarks/augmentation.md has figures.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

from vissl_zero.config.blocks.data import Data, Split
from vissl_zero.data.dataset import MicroBatchDataset, MicroBatchPlan, seed_sample
from vissl_zero.data.decode import Decoder
from vissl_zero.data.source import EncodedSource
from vissl_zero.data.split_pipeline import build_split_pipeline

if True:  # after vissl_zero, without which some builds of torchvision cannot be imported
    from lightly.transforms import SwaVTransform
    from torchvision.transforms import InterpolationMode, v2

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
VIEWS = {
    "swav224": {"sizes": [224, 96], "counts": [2, 6], "scales": [[0.14, 1.0], [0.05, 0.14]]},
    "cifar": {"sizes": [32, 16], "counts": [2, 4], "scales": [[0.2, 1.0], [0.05, 0.2]]},
}


class Files(EncodedSource):
    """JPEG files in memory, over and over."""

    class_names = ()

    def __init__(self, files: list[bytes], length: int):
        super().__init__(Decoder())
        self._files, self._length = files, length

    def __len__(self) -> int:
        return self._length

    def encoded(self, index: int) -> bytes:
        return self._files[index % len(self._files)]

    def name(self, index: int) -> str:
        return f"file {index}"

    def label(self, index: int) -> int | None:
        return None


def photographs() -> list[bytes]:
    """24 JPEGs of 500 x 375 pixels: parts of two photographs of 640 x 427, at several sizes."""
    files, rng = [], np.random.default_rng(0)
    for index in range(24):
        image = Image.fromarray(load_sample_images().images[index % 2])
        width = int(rng.uniform(500, 640))
        left, top = int(rng.uniform(0, 640 - width + 1)), int(rng.uniform(0, max(1, 427 - width * 3 // 4)))
        part = image.crop((left, top, left + width, min(427, top + width * 3 // 4)))
        file = io.BytesIO()
        part.resize((500, 375), Image.Resampling.LANCZOS).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def entries(views: dict[str, list]) -> list[dict]:
    """The recipe: multi-crop, flip, color distortion, blur, normalize."""
    return [
        {
            "name": "ImgPilToMultiCrop",
            "total_num_crops": sum(views["counts"]),
            "num_crops": views["counts"],
            "size_crops": views["sizes"],
            "crop_scales": views["scales"],
        },
        {"name": "RandomHorizontalFlip", "p": 0.5},
        {"name": "ImgPilColorDistortion", "strength": 1.0},
        {"name": "ImgPilGaussianBlur", "p": 0.5, "radius_min": 0.1, "radius_max": 2.0},
        {"name": "ToTensor"},
        {"name": "Normalize", "mean": MEAN, "std": STD},
    ]


def ours(backend: str, views: dict[str, list], files: list[bytes], place: str = "workers") -> Callable[[int], object]:
    """One image through the loader's own micro-batch: read, decode, transform, collate."""
    split = Split(TRANSFORMS=entries(views))
    pipeline = build_split_pipeline(Data(BACKEND=backend, AUGMENT_ON=place, TRAIN=split), "TRAIN")
    dataset = MicroBatchDataset(Files(files, 2**31), pipeline, 0, skip_broken=False)

    def load(start: int, count: int = 24) -> object:
        return dataset[MicroBatchPlan(0, tuple(range(start, start + count)), count)].batch

    return load


def torchvision_v2(views: dict[str, list], files: list[bytes]) -> Callable[[int], object]:
    """torchvision's second version on tensors of 8 bits, decoded by simplejpeg."""
    later = [
        v2.RandomHorizontalFlip(0.5),
        v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
        v2.RandomGrayscale(0.2),
        v2.RandomApply([v2.GaussianBlur(13, (0.1, 2.0))], p=0.5),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
    crops = [
        v2.Compose([v2.RandomResizedCrop(size, tuple(scale), interpolation=InterpolationMode.BILINEAR), *later])
        for size, count, scale in zip(views["sizes"], views["counts"], views["scales"], strict=True)
        for _ in range(count)
    ]

    def load(start: int, count: int = 24) -> object:
        samples: list[list[Tensor]] = []
        for index in range(start, start + count):
            seed_sample(0, 0, index)
            pixels = simplejpeg.decode_jpeg(files[index % len(files)], "RGB")
            image = torch.from_numpy(pixels).permute(2, 0, 1)
            samples.append([crop(image) for crop in crops])
        same = range(len(crops))
        first = views["counts"][0]
        return [torch.stack([s[c] for c in part for s in samples]) for part in (same[:first], same[first:])]

    return load


def lightly(views: dict[str, list], files: list[bytes]) -> Callable[[int], object]:
    """lightly's transform of SwAV, on images that Pillow decodes."""
    transform = SwaVTransform(
        crop_sizes=tuple(views["sizes"]),
        crop_counts=tuple(views["counts"]),
        crop_min_scales=tuple(low for low, _ in views["scales"]),
        crop_max_scales=tuple(high for _, high in views["scales"]),
        normalize={"mean": MEAN, "std": STD},
    )

    def load(start: int, count: int = 24) -> object:
        samples = []
        for index in range(start, start + count):
            seed_sample(0, 0, index)
            samples.append(transform(Image.open(io.BytesIO(files[index % len(files)])).convert("RGB")))
        first = views["counts"][0]
        parts = (range(first), range(first, sum(views["counts"])))
        return [torch.stack([sample[crop] for crop in part for sample in samples]) for part in parts]

    return load


def decode(how: str, files: list[bytes]) -> Callable[[int], object]:
    """Decoding alone."""

    def load(start: int, count: int = 24) -> None:
        for index in range(start, start + count):
            file = files[index % len(files)]
            if how == "Pillow":
                np.asarray(Decoder().image(file, ""))
            else:
                height, width, *_ = simplejpeg.decode_jpeg_header(file)
                part = 1 if how == "simplejpeg" else 2
                simplejpeg.decode_jpeg(file, "RGB", min_height=height // part, min_width=width // part)

    return load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--views", choices=VIEWS, default="swav224")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=4, help="of 24 images, for each pipeline and round")
    parser.add_argument("--files", type=Path, help="a folder of JPEGs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    files = [path.read_bytes() for path in sorted(options.files.rglob("*.jp*g"))] if options.files else photographs()
    views = VIEWS[options.views]
    systems = {
        "torchvision v2, simplejpeg": torchvision_v2(views, files),
        "lightly's SwaVTransform": lightly(views, files),
        "ours, pil": ours("pil", views, files),
        "ours, fast": ours("fast", views, files),
        "ours, fast, a worker's part": ours("fast", views, files, "device"),
        "decode: simplejpeg": decode("simplejpeg", files),
        "decode: simplejpeg, half size": decode("half", files),
        "decode: Pillow": decode("Pillow", files),
    }
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(options.rounds + 1):
        names = list(systems)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begun = time.process_time()
            for batch in range(options.batches):
                systems[name](24 * (turn * options.batches + batch))
            if turn:  # the first warms up
                rates[name].append(24 * options.batches / (time.process_time() - begun))
    slow = rates["ours, pil"]
    print(f"{options.views}, {len(files)} files, {options.rounds} rounds of {24 * options.batches} images")
    for name, found in rates.items():
        low, middle, high = statistics.quantiles(found, n=4)
        ratio = statistics.median(a / b for a, b in zip(found, slow, strict=True))
        print(f"{name:32s} {middle:8.1f} images/s ({low:.1f} to {high:.1f}), {ratio:5.2f} x ours, pil")


if __name__ == "__main__":
    main()
