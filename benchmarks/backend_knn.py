"""Train SimCLR and SwAV on CIFAR-10's JPEGs with either image backend, and print kNN top-1 of each seed.

Usage: python benchmarks/backend_knn.py --data <folder> [--images 5000] [--seeds 3]

The runs are those of ``cifar_methods.py`` (trunk, length, optimizer, kNN), except that the loader reads and decodes
each file anew and that views are the product's own: random resized crops, flip, color distortion, blur. Only
``DATA.BACKEND`` differs within a pair, and both draw the same numbers for the same sample. Figures are in
``benchmarks/augmentation.md``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from cifar_methods import _MEAN, _STD, _Bench, _Own
from one_process import be_a_rank

# Crops of the paper's scales; SwAV with its small crops.
_CROPS = {
    "simclr": "total_num_crops: 2, num_crops: [2], size_crops: [32], crop_scales: [[0.2, 1.0]]",
    "swav": "total_num_crops: 6, num_crops: [2, 4], size_crops: [32, 16], crop_scales: [[0.2, 1.0], [0.05, 0.2]]",
}


class _BackendBench(_Bench):
    """Runs whose views come from the product's transforms with one backend."""

    def __init__(self, backend: str, method: str, *args: Any):
        super().__init__(*args)
        self._backend = backend
        self._method = method

    def _changes(self, trunk: str, own: _Own) -> dict[str, Any]:
        values = super()._changes(trunk, own)
        normalize = f"{{name: Normalize, mean: {_MEAN.tolist()}, std: {_STD.tolist()}}}"
        views = [
            f"{{name: ImgPilToMultiCrop, {_CROPS[self._method]}}}",
            "{name: RandomHorizontalFlip, p: 0.5}",
            "{name: ImgPilColorDistortion, strength: 0.5}",
            "{name: ImgPilGaussianBlur, p: 0.5, radius_min: 0.1, radius_max: 1.0}",
            "{name: ToTensor}",
            normalize,
        ]
        values["DATA.TRAIN.TRANSFORMS"] = f"[{', '.join(views)}]"
        values["DATA.TRAIN.DATA_SOURCES"] = "[disk_folder]"
        # The trained trunk is tested on the same pixels, whatever it was trained on.
        values["DATA.TEST.DATA_SOURCES"] = "[disk_folder]"
        values["DATA.BACKEND"] = self._backend
        return values


def main() -> None:
    """Run every method with every seed and backend, and print a line for each and the differences of pairs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    be_a_rank()
    for method in _CROPS:
        gains = []
        for seed in range(options.seeds):
            top1 = {}
            for backend in ("pil", "fast"):
                with tempfile.TemporaryDirectory() as folder:
                    bench = _BackendBench(backend, method, options.data.absolute(), options.images, seed, Path(folder))
                    figures = bench.figures(method)
                top1[backend] = figures["trained_knn"]
                print(method, seed, backend, figures, flush=True)
            gains.append(top1["fast"] - top1["pil"])
        print(f"{method}: fast - pil {gains}, mean {statistics.mean(gains):+.2f} points", flush=True)


if __name__ == "__main__":
    main()
