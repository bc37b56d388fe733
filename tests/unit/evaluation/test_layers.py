"""Linear evaluation of several layers of a frozen trunk (LINEAR_EVAL_FEAT_POOL_OPS_MAP)."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import nn

from tests.blocks import model_block
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.checkpoint.first_weights import load_first_weights
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.errors import ConfigError
from vissl_zero.evaluation.accuracy import AccuracyHook
from vissl_zero.evaluation.feature_files import ExtractFeatures, read_features
from vissl_zero.evaluation.knn import KnnHook
from vissl_zero.models.model import _with_room, build_model
from vissl_zero.models.trunks.resnet import ResNet
from vissl_zero.models.trunks.vision_transformer import VisionTransformer

# RegNet of three blocks on 8x8 images: maps of 8x4x4, 16x2x2 and 32x1x1.
LAYERS = [
    (["conv1", ["AdaptiveAvgPool2d", [[2, 2]]]], ["eval_mlp", {"in_channels": 8, "dims": [32, 10]}]),
    (["res2", ["AvgPool2d", [[2, 2], 2, 0]]], ["eval_mlp", {"in_channels": 8, "dims": [-1, 10]}]),
    (["res2", ["Identity", []]], ["mlp", {"dims": [-1, 10]}]),
    (["stages.0.0", ["AdaptiveMaxPool2d", [[1, 1]]]], ["eval_mlp", {"in_channels": 8, "dims": [8, 16, -1]}]),
    (["res5avg", ["Identity", []]], ["eval_mlp", {"in_channels": -1, "dims": [-1, 10]}]),
]


def layers():
    """LAYERS with the widths that are -1 filled in from the trunk as it is."""
    trunk = build_model(model_block(make_config()["MODEL"])).trunk.eval()
    shapes = {}
    for index, stage in enumerate(trunk.stages, 2):
        stage[-1].register_forward_hook(lambda _m, _i, out, name=f"res{index}": shapes.update({name: out[0].shape}))
    trunk([torch.zeros(1, 3, 8, 8)])
    shapes["res5avg"] = (1, trunk.feature_dim, 1, 1)
    found = []
    for entry, (name, keys) in copy.deepcopy(LAYERS):
        if keys["dims"][0] == -1:
            _, channels, height, width = shapes[entry[0]]
            side = 2 if entry[1][0] == "AvgPool2d" else 1
            keys["dims"][0] = channels * (height // side) * (width // side)
            if name == "eval_mlp":
                keys["in_channels"] = channels
        found.append((entry, [name, keys]))
    return found


def evaluate(chosen, **knn):
    """Train a head per layer; what was measured and the heads' tensors."""
    config = make_config(**{"USE_KNN": False, **knn})
    settings = config["MODEL"]["FEATURE_EVAL_SETTINGS"]
    settings |= {"EVAL_MODE_ON": True, "FREEZE_TRUNK_ONLY": True, "SHOULD_FLATTEN_FEATS": False}
    settings["LINEAR_EVAL_FEAT_POOL_OPS_MAP"] = [entry for entry, _ in chosen]
    config["MODEL"]["HEAD"]["PARAMS"] = [head for _, head in chosen]
    config["MODEL"]["NON_TRAINABLE_PARAMS"] = ["trunk"]
    run, schedules, frozen = build_run(make_plan(config, num_epochs=3), torch.device("cpu"))
    train(run, schedules, frozen, [*([KnnHook(run.plan)] if knn else []), AccuracyHook()])
    state = run.sharded.full_state()
    heads = [
        {name.partition(f"heads.{index}.")[2]: tensor for name, tensor in state.items() if f"heads.{index}." in name}
        for index in range(len(chosen))
    ]
    return run.results, heads


def test_knn_of_each_layer_is_that_of_the_layer_alone(tmp_path):
    def measured(*entries):
        config = make_config()
        settings = config["MODEL"]["FEATURE_EVAL_SETTINGS"]
        settings |= {"EVAL_MODE_ON": True, "FREEZE_TRUNK_ONLY": True, "EXTRACT_TRUNK_FEATURES_ONLY": True}
        settings["LINEAR_EVAL_FEAT_POOL_OPS_MAP"] = list(entries)
        config["TEST_ONLY"] = True
        run, schedules, frozen = build_run(make_plan(config, tmp_path), torch.device("cpu"))
        train(run, schedules, frozen, [KnnHook(run.plan), ExtractFeatures()])
        return run.results

    entries = [["conv1", ["Identity", []]], ["res2", ["AdaptiveAvgPool2d", [[1, 1]]]], ["res5avg", ["Identity", []]]]
    both = measured(*entries)
    found = read_features(tmp_path, "TEST")
    assert list(found.layers) == list(both["knn_top1_by_layer"]) == ["conv1", "res2", "res5avg"]
    assert both["knn_top1_after"] == max(both["knn_top1_by_layer"].values())
    for entry in entries:
        assert measured(entry)["knn_top1_by_layer"] == {entry[0]: both["knn_top1_by_layer"][entry[0]]}
        alone = read_features(tmp_path, "TEST")
        torch.testing.assert_close(found.rows[:, found.layers[entry[0]]], alone.rows, rtol=0, atol=1e-12)


def test_without_test_model_features_of_train_alone_are_written(tmp_path):
    config = make_config()
    config["TEST_ONLY"], config["TEST_MODEL"] = True, False
    run, _, _ = build_run(make_plan(config, tmp_path), torch.device("cpu"))
    ExtractFeatures().on_end(run)
    assert list(run.results["features_extracted"]) == ["TRAIN"]


def test_two_heads_on_one_layer_with_one_pooling_are_both_reported():
    chosen = [layers()[index] for index in (-1, -1, 0)]  # as VISSL's in1k linear recipe, which has eval_mlp beside mlp
    results, _ = evaluate(chosen)
    assert list(results["top1_by_layer"]) == ["res5avg Identity[], head 0", "res5avg Identity[], head 1", "conv1"]
    assert results["best_layer"] in results["top1_by_layer"]
    assert results["top1"] == max(results["top1_by_layer"].values())


def test_each_layer_is_evaluated_as_by_a_probe_of_its_own():
    chosen = layers()
    results, heads = evaluate(chosen)
    assert len(results["top1_by_layer"]) == 5 and results["top1"] == max(results["top1_by_layer"].values())
    names = ["conv1", "res2 AvgPool2d[[2, 2], 2, 0]", "res2 Identity[]", "stages.0.0", "res5avg"]
    assert list(results["top1_by_layer"]) == names
    for layer, head, (name, top1) in zip(chosen, heads, results["top1_by_layer"].items(), strict=True):
        alone, (own,) = evaluate([layer])
        assert alone["top1"] == top1, name
        assert own.keys() == head.keys()
        for key, tensor in own.items():
            torch.testing.assert_close(head[key], tensor, rtol=0, atol=1e-10)


RESNET_LAYERS = [
    (["conv1", ["AdaptiveAvgPool2d", [[2, 2]]]], ["eval_mlp", {"in_channels": 64, "dims": [256, 10]}]),
    (["res2", ["AdaptiveAvgPool2d", [[1, 1]]]], ["eval_mlp", {"in_channels": 64, "dims": [64, 10]}]),
    (["res3", ["AdaptiveMaxPool2d", [[1, 1]]]], ["eval_mlp", {"in_channels": 128, "dims": [128, 10]}]),
    (["res4", ["Identity", []]], ["mlp", {"dims": [256, 10]}]),
    (["res5avg", ["Identity", []]], ["mlp", {"dims": [512, 10]}]),
]


@pytest.mark.slow
def test_five_layers_of_a_trained_resnet_are_evaluated_as_by_probes_of_their_own(tmp_path):
    def small():
        config = make_config(USE_KNN=False)
        config["DATA"]["TRAIN"]["DATA_LIMIT"] = 32
        config["MODEL"]["TRUNK"] |= {"NAME": "resnet", "RESNETS": {"DEPTH": 18}}
        config["MODEL"]["HEAD"]["PARAMS"] = [["mlp", {"dims": [512, 10]}]]
        return config

    def trained(config):
        plan = make_plan(config)
        run, schedules, frozen = build_run(plan, torch.device("cpu"), lambda model: load_first_weights(model, plan))
        before = run.sharded.full_state()
        train(run, schedules, frozen, [AccuracyHook()])
        return run, before

    run, before = trained(small())
    weights = {name: tensor for name, tensor in run.sharded.full_state().items() if name.startswith("trunk.")}
    assert all(not torch.equal(tensor, before[name]) for name, tensor in weights.items())
    torch.save(weights, tmp_path / "trunk.pt")

    def evaluated(chosen):
        config = small()
        settings = config["MODEL"]["FEATURE_EVAL_SETTINGS"]
        settings |= {"EVAL_MODE_ON": True, "FREEZE_TRUNK_ONLY": True, "SHOULD_FLATTEN_FEATS": False}
        settings["LINEAR_EVAL_FEAT_POOL_OPS_MAP"] = [entry for entry, _ in chosen]
        config["MODEL"]["HEAD"]["PARAMS"] = copy.deepcopy([head for _, head in chosen])
        config["MODEL"]["WEIGHTS_INIT"]["PARAMS_FILE"] = str(tmp_path / "trunk.pt")
        config["MODEL"]["NON_TRAINABLE_PARAMS"] = ["trunk"]
        run, before = trained(config)
        for name in (name for name in weights if not name.endswith("num_batches_tracked")):
            torch.testing.assert_close(before[name], weights[name], rtol=1e-6, atol=1e-6, msg=name)  # read in float32
        return run.results["top1_by_layer"], run.sharded.full_state()

    accuracies, state = evaluated(RESNET_LAYERS)
    assert list(accuracies) == ["conv1", "res2", "res3", "res4", "res5avg"]
    for index, layer in enumerate(RESNET_LAYERS):
        alone, own = evaluated([layer])
        assert alone == {layer[0][0]: accuracies[layer[0][0]]}
        heads = {name: tensor for name, tensor in own.items() if name.startswith("heads.0.")}
        assert heads
        for name, tensor in heads.items():
            together = state[name.replace("heads.0.", f"heads.{index}.", 1)]
            torch.testing.assert_close(together, tensor, rtol=0, atol=1e-10, msg=f"{layer[0][0]} {name}")


def test_widths_that_do_not_fit_are_named():
    (first, head), *others = layers()
    chosen = [(first, [head[0], head[1] | {"dims": [31, 10], "in_channels": 4}]), *others]
    with pytest.raises(ConfigError, match=r"(?s)PARAMS\[0\]\.dims: must begin with the 32.*PARAMS\[0\]\.in_channels"):
        evaluate(chosen)
    with pytest.raises(ConfigError, match=r"PARAMS\[0\]\.dims: must begin with the 32"):
        evaluate(chosen, USE_KNN=True)  # whose first pass stops before the heads


def test_a_layer_that_the_trunk_lacks_is_named():
    with pytest.raises(ConfigError, match=r"'res9'.*Name a layer of the trunk: conv1"):
        evaluate([(["res9", ["Identity", []]], ["mlp", {"dims": [8, 10]}])])


@pytest.mark.parametrize(
    ("layer", "got"),
    [("res2", r"got maps of \d x \d\)\. Write"), ("flatten", r"got vectors of 32\)\. Write")],
)
def test_a_pooling_that_a_layer_has_no_room_for_is_named(layer, got):
    wide = ([layer, ["AvgPool2d", [[9, 9], 1, 0]]], ["mlp", {"dims": [8, 10]}])
    with pytest.raises(ConfigError, match=rf"POOL_OPS_MAP\[1\]: must pool .*AvgPool2d\(kernel_size=\(9, 9\).*{got}"):
        evaluate([layers()[0], wide])


def test_room_is_what_torch_s_poolings_need():
    windows = product((1, 2, 4), (1, 2, 3), (0, 1), (1, 2), (False, True), (1, 2, 3, 5))
    for kernel, stride, padding, dilation, ceil_mode, size in windows:
        if padding > kernel // 2:  # refused by torch whatever the size
            continue
        pools = [nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil_mode)]
        pools += [nn.AvgPool2d(kernel, stride, padding, ceil_mode)] if dilation == 1 else []
        for pool in pools:
            maps = torch.ones(1, 1, size, size)
            assert _is_refused(pool, maps) == _is_refused(_with_room, pool, 0, maps), (pool, size)


def _is_refused(function, *args):
    try:
        function(*args)
    except (RuntimeError, ConfigError):
        return True
    return False


def test_resnet_has_vissl_s_names():
    trunk = ResNet(DEPTH=18).eval()
    image = torch.randn(2, 3, 64, 64)
    shapes = {}
    for name in trunk.tap_names:
        tap = trunk.tap(name)
        caught = [[] for _ in tap.layers]
        handles = [
            trunk.get_submodule(path).register_forward_hook(
                lambda _m, _i, out, into=into: into.extend(out if isinstance(out, list) else [out])
            )
            for path, into in zip(tap.layers, caught, strict=True)
        ]
        features = trunk([image])
        shapes[name] = tuple((tap.combine(caught, features) if tap.combine else caught[0])[0].shape[1:])
        for handle in handles:
            handle.remove()
    maps = {"conv1": (64, 32, 32), "res1": (64, 16, 16), "res2": (64, 16, 16), "res3": (128, 8, 8)}
    maps |= {"res4": (256, 4, 4), "res5": (512, 2, 2), "res5avg": (512, 1, 1), "avgpool": (512, 1, 1)}
    assert shapes == maps | {"flatten": (512,)}


def test_vision_transformer_has_vissl_s_names():
    options = {"IMAGE_SIZE": 16, "PATCH_SIZE": 8, "NUM_LAYERS": 5, "NUM_HEADS": 2, "HIDDEN_DIM": 8, "MLP_DIM": 16}
    trunk = VisionTransformer(**options).double().eval()
    names = ["lastCLS", "concatCLS4", "blkCLS1", "lastPOOL", "concatPOOL2", "stridePOOL_2", "stridePOOL_2_1", "lastBLK"]
    taps = {name: trunk.tap(name) for name in [*names, "concatBLK2", "lastMAP"]}
    images = [torch.randn(3, 3, 16, 16).double(), torch.randn(2, 3, 24, 24).double()]
    with torch.no_grad():
        features = trunk(images)
        got = {name: tap.combine([], features) for name, tap in taps.items()}
        blocks, xs = [], trunk.embedding(images)
        for block in trunk.blocks:
            xs = block(xs)
            blocks.append([nn.functional.layer_norm(x, (8,), *trunk.norm[0].parameters(), eps=1e-6) for x in xs])
    for r in range(2):
        by_block = [tokens[r] for tokens in blocks]
        pooled = [tokens[:, 1:].mean(dim=1) for tokens in by_block]
        wanted = {
            "lastCLS": by_block[4][:, 0],
            "concatCLS4": torch.cat([tokens[:, 0] for tokens in by_block[1:]], dim=1),
            "blkCLS1": by_block[1][:, 0],
            "lastPOOL": pooled[4],
            "concatPOOL2": torch.cat(pooled[3:], dim=1),
            "stridePOOL_2": torch.cat([pooled[4], pooled[1]], dim=1),
            "stridePOOL_2_1": torch.cat([pooled[4], pooled[3]], dim=1),
            "lastBLK": by_block[4],
            "concatBLK2": torch.cat(by_block[3:], dim=2),
            "lastMAP": by_block[4][:, 1:].unflatten(1, (2, 2) if r == 0 else (3, 3)),
        }
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name][r], tensor, rtol=0, atol=1e-12, msg=name)
    assert trunk.tap("concatCLS6") is None and trunk.tap("res5") is None and trunk.tap("blkCLS5") is None
