"""Where the libraries keep weights of a name, and the command that brings those that are missing. No network."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vissl_zero.checkpoint.named_weights import Located, _hub_folder, locate
from vissl_zero.errors import CheckpointError

META = "https://dl.fbaipublicfiles.com"
HUB = {
    "dinov2_vits14": f"{META}/dinov2/dinov2_vits14/dinov2_vits14_pretrain.pth",
    "dinov2_vitb14_reg": f"{META}/dinov2/dinov2_vitb14/dinov2_vitb14_reg4_pretrain.pth",
    "dinov2_vitl14": f"{META}/dinov2/dinov2_vitl14/dinov2_vitl14_pretrain.pth",
    "dinov2_vitg14_reg": f"{META}/dinov2/dinov2_vitg14/dinov2_vitg14_reg4_pretrain.pth",
    "dino_vits16": f"{META}/dino/dino_deitsmall16_pretrain/dino_deitsmall16_pretrain.pth",
    "dino_vits8": f"{META}/dino/dino_deitsmall8_pretrain/dino_deitsmall8_pretrain.pth",
    "dino_vitb16": f"{META}/dino/dino_vitbase16_pretrain/dino_vitbase16_pretrain.pth",
    "dino_vitb8": f"{META}/dino/dino_vitbase8_pretrain/dino_vitbase8_pretrain.pth",
    "dino_resnet50": f"{META}/dino/dino_resnet50_pretrain/dino_resnet50_pretrain.pth",
}


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))


@pytest.mark.parametrize("name", HUB)
def test_torch_hubs_names_are_of_its_files(name: str, tmp_path: Path) -> None:
    file = tmp_path / "hub" / "checkpoints" / HUB[name].rpartition("/")[2]
    with pytest.raises(CheckpointError) as caught:
        locate(f"torchhub:{name}")
    assert str(caught.value) == (
        f"torchhub:{name} is not in torch's cache. Fill it where there is a network: "
        f"curl -L --create-dirs -o {file} {HUB[name]} (TORCH_HOME names the cache's folder)."
    )
    file.parent.mkdir(parents=True)
    file.touch()
    assert locate(f"torchhub:{name}") == Located(file)


def test_torchs_folder_is_where_its_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", "~/elsewhere")
    assert _hub_folder() == Path.home() / "elsewhere" / "hub" / "checkpoints"
    monkeypatch.delenv("TORCH_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert _hub_folder() == Path("/cache/torch/hub/checkpoints")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert _hub_folder() == Path.home() / ".cache" / "torch" / "hub" / "checkpoints"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("torchhub:dinov2_vits15", r"must be one of dinov2_vits14, .*Did you mean 'dinov2_vits14'"),
        ("torchvision:resnet51", r"torchvision has no such classifier\..*Did you mean 'resnet5"),
        ("torchvision:resnet50.V3", "must be one of IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT after the dot"),
        ("torchvision:deeplabv3_resnet50", "torchvision has no such classifier"),  # torchvision has it, to segment
        ("timm:resnet51", r"timm has no such model\..*Did you mean"),
        ("timm:resnet50.nobodys", r"timm has no such weights; it has resnet50\."),
        ("timm:vit_base_patch16_18x2_224", "nobody has published weights of this model"),
        ("hf:a/b/c", "'a/b/c' is neither a folder nor <owner>/<name> of the Hub"),
        ("hf:nobody/nothing", r"is not in Hugging Face's cache\. .* hf download nobody/nothing"),
    ],
)
def test_names_that_nobody_has_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        locate(name)


@pytest.mark.parametrize(
    ("name", "file", "size", "model"),
    [
        ("torchvision:resnet50", "resnet50-11ad3fa6.pth", 224, "torchvision/resnet50"),  # the newest of two
        ("torchvision:resnet50.IMAGENET1K_V1", "resnet50-0676ba61.pth", 224, "torchvision/resnet50"),
        ("torchvision:inception_v3", "inception_v3_google-0cc3c7bd.pth", 299, "torchvision/inception_v3"),
    ],
)
def test_torchvisions_weights_come_with_their_preprocessing(
    name: str, file: str, size: int, model: str, tmp_path: Path
) -> None:
    path = tmp_path / "hub" / "checkpoints" / file
    path.parent.mkdir(parents=True)
    path.touch()
    preprocessing = {"size": size, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    assert locate(name) == Located(path, model, preprocessing)


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    assert locate("~/a.pth") == Located(Path.home() / "a.pth")
    assert locate(f"hf:{tmp_path}") == Located(tmp_path)


def test_timms_weights_are_a_folder_of_the_hub_or_a_file_of_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imagenet = {"size": 224, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    asked: list[str] = []

    def cached(repo: str, file: str) -> str | None:
        asked.append(repo)
        return str(tmp_path / file) if file == "pytorch_model.bin" else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    assert locate("timm:resnet18.a1_in1k") == Located(tmp_path, "timm/resnet18", imagenet)
    assert set(asked) == {"timm/resnet18.a1_in1k"}
    assert locate("hf:mine/model") == Located(tmp_path)
    for url, file in (("https://there/r18.pth", "r18.pth"),):
        config = SimpleNamespace(
            input_size=(3, 224, 224), mean=imagenet["mean"], std=imagenet["std"], hf_hub_id=None, url=url
        )
        monkeypatch.setattr("timm.models.get_pretrained_cfg", lambda name, config=config: config)
        with pytest.raises(CheckpointError, match=f"timm:resnet18 is not in torch's cache.*{url}"):
            locate("timm:resnet18")
        place = tmp_path / "hub/checkpoints" / file
        place.parent.mkdir(parents=True)
        place.touch()
        assert locate("timm:resnet18") == Located(place, "timm/resnet18", imagenet)
