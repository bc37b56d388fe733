"""Package metadata; tool settings live in pyproject.toml, exact pins in requirements.txt and requirements-dev.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "vissl_zero/version.py").read_text())
assert VERSION is not None

setup(
    name="vissl-zero",
    version=VERSION.group(1),
    description="Large vision models trained from a YAML file, on whatever memory there is.",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["vissl_zero*"]),
    package_data={
        "vissl_zero": [
            "py.typed",
            "conf/**/*.yaml",
            "weights/*.json",
            "vissl/*.yaml",
            "planner/machines/*.yaml",
            "methods/figures.json",
            "reporting/comparison_page.html",
            "methods/digits_teacher/*",
        ]
    },
    install_requires=[
        "torch>=2.11",
        "torchvision>=0.26",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "fairscale>=0.4.13",
        "timm>=1.0.20",
        "schedulefree>=1.4.1,<2",
        "classy-vision>=0.7.0",
        "submitit>=1.5",
        "hydra-submitit-launcher>=1.2",
        "numpy>=1.26",
        "pyyaml>=6",
        "pillow>=10",
        "rich>=13",
        "tensorboard>=2.15",
        "matplotlib>=3.8",
        "scikit-learn>=1.4",
        "safetensors>=0.4.3",
        "xxhash>=3.5",
    ],
    extras_require={
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-randomly>=4",
            "pytest-rerunfailures>=15",
            "pytest-xdist>=3.6",
            "ruff",
            "mypy",
            "pre-commit",
            "nbclient",  # runs the notebooks of examples/
            "ipykernel",
            "lightly>=1.6,<1.7",  # compared with, by benchmarks/twins.py and its test
        ],
        # vissl-zero export --to onnx, and embed --out X.parquet.
        "export": ["onnx>=1.18", "onnxscript>=0.3", "onnxruntime>=1.20", "pyarrow>=16"],
        # DATA.BACKEND=fast.
        "fast": ["simplejpeg>=1.8", "opencv-python-headless>=4.10"],
        # MODEL.LORA, and vissl-zero export --to peft.
        "lora": ["peft>=0.18"],
        # Data sources; the standard library reads the tars of webdataset.
        "webdataset": [],
        "arrow": ["pyarrow>=17"],
        "lmdb": ["lmdb>=1.5"],
        "hdf5": ["h5py>=3.10"],
        # Images whose files are DICOM.
        "dicom": ["pydicom>=3"],
        # Loggers (config.HOOKS.LOGGERS). mlflow-skinny with the two packages of its database: all of mlflow is 1 GB.
        "wandb": ["wandb>=0.18"],
        "mlflow": ["mlflow-skinny>=3", "sqlalchemy>=2", "alembic>=1.13"],
        "trackio": ["trackio>=0.20"],
        # hydra/sweeper=optuna.
        "optuna": ["hydra-optuna-sweeper>=1.3,<1.4"],
        # Only compared with, by benchmarks/step_cost.py; how to build it: benchmarks/step_cost_deepspeed.py.
        "deepspeed": ["deepspeed>=0.19.8,<0.20", "ninja"],
    },
    entry_points={"console_scripts": ["vissl-zero = vissl_zero.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "License :: OSI Approved :: MIT License",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
