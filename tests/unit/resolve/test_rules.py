"""Cross-key rules: every refusal names the key, what it must be, what it got and what to write."""

from __future__ import annotations

from dataclasses import is_dataclass

import pytest
from PIL import Image

from tests.unit.config.example_config import CPU_HOST, GPU_HOST, complaints
from vissl_zero.config.blocks.model_and_loss import RegNetBlock
from vissl_zero.resolve import resolved
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.image_files import EXTENSIONS
from vissl_zero.resolve.model_rules import _checkpointing_problem, _widths
from vissl_zero.resolve.other_files import PICTURES

TAPS = "MODEL__FEATURE_EVAL_SETTINGS__"
TAPPED = {f"{TAPS}EVAL_MODE_ON": True, f"{TAPS}FREEZE_TRUNK_ONLY": True}


def crops(num_crops, size_crops):
    """A transform that makes these numbers of crops of these sizes."""
    name = "ImgPilToMultiCrop"
    return {"name": name, "num_crops": num_crops, "size_crops": size_crops, "crop_scales": [[0.1, 1.0]]}


REFUSALS = {
    "level": ({"ZERO__LEVEL": 4}, "config.ZERO.LEVEL: must be auto, fit, 0, 1, 2 or 3 (got 4)"),
    "level and type": (
        {"ZERO__LEVEL": 2, "ZERO__type": "ZeroRedundancyOptimizer_Level_3"},
        "config.ZERO.LEVEL: contradicts config.ZERO.type=ZeroRedundancyOptimizer_Level_3 (got 2)",
    ),
    "no such type": (
        {"ZERO__LEVEL": "auto", "ZERO__type": "ZeroRedundancyOptimizer"},
        "config.ZERO.type: must be ZeroRedundancyOptimizer_Level_1, _2 or _3",
    ),
    "nvme_path": (
        {"ZERO__offload_optimizer_config__device": "nvme", "ZERO__offload_optimizer_config__nvme_path": __file__},
        "config.ZERO.offload_optimizer_config.nvme_path: must name a folder that exists",
    ),
    "buffer": ({"MODEL__SHARDED_DDP_SETUP__reduce_buffer_size": -2}, "reduce_buffer_size: must be at least -1"),
    "bucket": ({"MODEL__FSDP_CONFIG__bucket_cap_mb": -1.0}, "bucket_cap_mb: must be at least 0"),
    "level fit is not there": ({"ZERO__LEVEL": "fit"}, "config.ZERO.LEVEL: must be decided from a forecast first"),
    "both switches": (
        {
            "ZERO__LEVEL": "auto",
            "MODEL__SHARDED_DDP_SETUP__USE_SDP": True,
            "MODEL__FSDP_CONFIG__AUTO_SETUP_FSDP": True,
        },
        "config.MODEL.SHARDED_DDP_SETUP.USE_SDP: cannot go with config.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP",
    ),
    "fairscale on the CPU": ({"ZERO__ENGINE": "fairscale"}, "level 3) on CUDA only, and this run is on the CPU"),
    "float8 on fairscale": (
        {"ZERO__ENGINE": "fairscale", "ZERO__LEVEL": 2, "MODEL__FLOAT8__USE_FLOAT8": True},
        "config.MODEL.FLOAT8.USE_FLOAT8: is not available on fairscale",
    ),
    "float8 layers": (
        {"MODEL__FLOAT8__USE_FLOAT8": True, "MODEL__FLOAT8__LAYERS": "fc(1"},
        "config.MODEL.FLOAT8.LAYERS: must be a regular expression (missing )",
    ),
    "no float8 layers": (
        {"MODEL__FLOAT8__USE_FLOAT8": True, "MODEL__FLOAT8__LAYERS": ""},
        "config.MODEL.FLOAT8.LAYERS: must be a regular expression that is not empty",
    ),
    "gathers in float8 without float8": (
        {"MODEL__FLOAT8__GATHER": True},
        "config.MODEL.FLOAT8.GATHER: needs layers that multiply in float8",
    ),
    "fairscale unsharded": ({"ZERO__ENGINE": "fairscale", "ZERO__LEVEL": 0}, "fairscale has no level 0"),
    "unknown engine": ({"ZERO__ENGINE": "torhc"}, "Did you mean 'torch'?"),
    "accumulation": (
        {"ZERO__gradient_accumulation_steps": 0},
        "gradient_accumulation_steps: must be at least 1 (got 0)",
    ),
    "clip": ({"ZERO__clip_grad": 0.0}, "config.ZERO.clip_grad: must be above 0"),
    "two clips": (
        {"ZERO__clip_grad": 0.5, "MODEL__GRAD_CLIP__USE_GRAD_CLIP": True},
        "config.MODEL.GRAD_CLIP.MAX_NORM: differs from config.ZERO.clip_grad=0.5",
    ),
    "norm type": (
        {"MODEL__GRAD_CLIP__USE_GRAD_CLIP": True, "MODEL__GRAD_CLIP__NORM_TYPE": 1.0},
        "config.MODEL.GRAD_CLIP.NORM_TYPE: must be 2",
    ),
    "shard groups": (
        {"ZERO__SHARD_GROUP_SIZE": 3, "DISTRIBUTED__NUM_PROC_PER_NODE": 4},
        "config.ZERO.SHARD_GROUP_SIZE: must be -1 (all processes), or 2 or more and divide the 4 processes (got 3)",
    ),
    "shard groups of one": ({"ZERO__SHARD_GROUP_SIZE": 1}, "or config.ZERO.LEVEL=0 to shard nothing"),
    "shard groups on fairscale": (
        {
            "ZERO__SHARD_GROUP_SIZE": 2,
            "DISTRIBUTED__NUM_PROC_PER_NODE": 4,
            "ZERO__LEVEL": 2,
            "ZERO__ENGINE": "fairscale",
        },
        "config.ZERO.SHARD_GROUP_SIZE: must be -1 on fairscale",
    ),
    "same bits on fairscale": (
        {"TRAINER__DETERMINISTIC": True, "ZERO__LEVEL": 2, "ZERO__ENGINE": "fairscale"},
        "config.TRAINER.DETERMINISTIC: is not available on fairscale",
    ),
    "same bits of compiled units": (
        {"TRAINER__DETERMINISTIC": True, "TRAINER__COMPILE": True},
        "config.TRAINER.DETERMINISTIC: is not available with config.TRAINER.COMPILE",
    ),
    "same bits in shard groups": (
        {"TRAINER__DETERMINISTIC": True, "ZERO__SHARD_GROUP_SIZE": 2, "DISTRIBUTED__NUM_PROC_PER_NODE": 4},
        "config.TRAINER.DETERMINISTIC: is not available with shard groups",
    ),
    "average decay": (
        {"HOOKS__EMA_MODEL__DECAY": 1.5},
        "config.HOOKS.EMA_MODEL.DECAY: must be from 0 to 1 (got 1.5)",
    ),
    "average interval": (
        {"HOOKS__EMA_MODEL__UPDATE_ITER": 0},
        "config.HOOKS.EMA_MODEL.UPDATE_ITER: must be at least 1",
    ),
    "offload at level 0": (
        {"ZERO__LEVEL": 0, "ZERO__offload_optimizer_config__device": "cpu"},
        "config.ZERO.offload_optimizer_config.device: needs ZeRO level 1, 2 or 3",
    ),
    "parameters below level 3": (
        {"ZERO__LEVEL": 2, "ZERO__offload_param_config__device": "cpu"},
        "config.ZERO.offload_param_config.device: needs ZeRO level 3",
    ),
    "offload device": ({"ZERO__offload_optimizer_config__device": "nvm"}, "Did you mean 'nvme'?"),
    "nvme without a path": (
        {"ZERO__offload_optimizer_config__device": "nvme"},
        "config.ZERO.offload_optimizer_config.nvme_path: must be given with nvme",
    ),
    "offload on fairscale": (
        {"ZERO__LEVEL": 1, "ZERO__ENGINE": "fairscale", "ZERO__offload_optimizer_config__device": "cpu"},
        "config.ZERO.ENGINE: must be torch or auto where state is offloaded",
    ),
    "sync bn group": ({"MODEL__SYNC_BN_CONFIG__GROUP_SIZE": -3}, "must divide the 2 processes"),
    "float64 with AMP": (
        {"TRAINER__DTYPE": "float64", "MODEL__AMP_PARAMS__USE_AMP": True},
        "config.TRAINER.DTYPE: cannot go with half precision (AMP)",
    ),
    "float64 with half compute": (
        {"TRAINER__DTYPE": "float64", "MODEL__FSDP_CONFIG__compute_dtype": "float16"},
        "compute_dtype: cannot go with config.TRAINER.DTYPE=float64",
    ),
    "bfloat16 with AMP": (
        {"TRAINER__DTYPE": "bfloat16", "MODEL__AMP_PARAMS__USE_AMP": True},
        "DTYPE: cannot go with config.MODEL.AMP_PARAMS.USE_AMP=True",
    ),
    "bfloat16 on fairscale": (
        {"TRAINER__DTYPE": "bfloat16", "ZERO__ENGINE": "fairscale", "ZERO__LEVEL": 1},
        "DTYPE: cannot go with the fairscale engine",
    ),
    "dtype": ({"TRAINER__DTYPE": "float46"}, "Did you mean 'float64'"),
    "AMP dtype": ({"MODEL__AMP_PARAMS__DTYPE": "half"}, "must be bfloat16 or float16"),
    "AMP type": ({"MODEL__FSDP_CONFIG__AMP_TYPE": "O3"}, "config.MODEL.FSDP_CONFIG.AMP_TYPE: must be O1 or O2"),
    "apex level": (
        {"MODEL__AMP_PARAMS__USE_AMP": True, "MODEL__AMP_PARAMS__AMP_ARGS__opt_level": "O2"},
        "opt_level: must be O1",
    ),
    "gpu": ({"MACHINE__DEVICE": "gpu"}, "config.MACHINE.DEVICE: cannot be used here: no NVIDIA driver is loaded"),
    "device": ({"MACHINE__DEVICE": "tpu"}, "must be auto or cpu or gpu"),
    "processes": ({"DISTRIBUTED__NUM_PROC_PER_NODE": 0}, "NUM_PROC_PER_NODE: must be at least 1"),
    "nodes": ({"DISTRIBUTED__NUM_NODES": 2}, "config.DISTRIBUTED.NUM_NODES: must be 1, unless machines know where"),
    "steps": ({"TRAINER__MAX_STEPS": 0}, "config.TRAINER.MAX_STEPS: must be at least 1"),
    "more processes than images": (
        {"DISTRIBUTED__NUM_PROC_PER_NODE": 1500},
        "config.DISTRIBUTED.NUM_PROC_PER_NODE: must be at most the number of images, 1437 (got 1500 processes)",
    ),
    "too few images for a step": ({"DATA__TRAIN__DATA_LIMIT": 20}, "the 20 there are make less than one step of 64"),
    "no source": ({"DATA__TRAIN__DATA_SOURCES": []}, "config.DATA.TRAIN.DATA_SOURCES: must name a data source"),
    "unknown source": ({"DATA__TRAIN__DATA_SOURCES": ["disk_floder"]}, "Did you mean 'disk_folder'"),
    "no path": ({"DATA__TRAIN__DATA_SOURCES": ["disk_folder"]}, "config.DATA.TRAIN.DATA_PATHS: must name a folder"),
    "unknown transform": ({"DATA__TRAIN__TRANSFORMS": [{"name": "ToTenser"}]}, "Did you mean 'ToTensor'"),
    "nested transform": (
        {"DATA__TEST__TRANSFORMS": [{"name": "RandomApply", "transforms": [{"name": "ColourJitter"}]}]},
        "Did you mean 'ColorJitter'",
    ),
    "transform without a name": ({"DATA__TRAIN__TRANSFORMS": ["ToTensor"]}, "must be a list of {name: ..., ...}"),
    "broken images": ({"DATA__ON_BROKEN_IMAGE": "ignore"}, "config.DATA.ON_BROKEN_IMAGE: must be raise or skip"),
    "labels": ({"DATA__TRAIN__LABEL_SOURCES": ["disk_filelist"]}, "LABEL_PATHS: must name the files of labels"),
    "batch": ({"DATA__TRAIN__BATCHSIZE_PER_REPLICA": 0}, "BATCHSIZE_PER_REPLICA: must be at least 1"),
    "limit": ({"DATA__TRAIN__DATA_LIMIT": 0}, "config.DATA.TRAIN.DATA_LIMIT: must be -1 or at least 1"),
    "unknown loss": ({"LOSS__name": "swav_los"}, "config.LOSS.name: must be a known loss (got 'swav_los')"),
    "a loss of VISSL's": (
        {"LOSS__name": "bce_logits_multiple_output_single_target"},
        "must be a known loss (got 'bce_logits_multiple",
    ),
    "mistyped block of a loss": (
        {"LOSS__swav_los": {}},
        "config.LOSS.swav_los: is not the name of a loss. Did you mean",
    ),
    "prototypes": (
        {"MODEL__HEAD__PARAMS": [["swav_head", {"dims": [64, 32], "num_clusters": [0]}]]},
        "config.MODEL.HEAD.PARAMS[0][1].num_clusters: must have at least 1 prototype in each layer (got [0])",
    ),
    "queue": (
        {"LOSS__swav_loss__queue__queue_length": 16},
        "queue_length: must be 0 (no queue) or at least the batch over all processes, 64 images (got 16)",
    ),
    "swav without its head": ({"MODEL__HEAD__PARAMS": [["mlp", {"dims": [64, 10]}]]}, "must be one swav_head"),
    "swav without crops": ({"DATA__TRAIN__TRANSFORMS": [{"name": "ToTensor"}]}, "must make two or more crops"),
    "assigned crops": ({"LOSS__swav_loss__crops_for_assign": [0, 4]}, "must list crops from 0 to 1 (got [0, 4])"),
    "temperature": (
        {"LOSS__swav_loss__temperature": 0.0},
        "LOSS.swav_loss.temperature: must be at least 0.0001",
    ),
    "no head": ({"MODEL__HEAD__PARAMS": []}, "config.MODEL.HEAD.PARAMS: must list at least one head"),
    "head form": ({"MODEL__HEAD__PARAMS": ["mlp"]}, 'config.MODEL.HEAD.PARAMS: must hold ["name", {key: value}]'),
    "unknown head": ({"MODEL__HEAD__PARAMS": [["swav_haed", {}]]}, "Did you mean 'swav_head'"),
    "head key": (
        {"MODEL__HEAD__PARAMS": [["swav_head", {"dims": [64, 32], "num_clusters": [3], "use_bm": True}]]},
        "config.MODEL.HEAD.PARAMS[0][1].use_bm: is not a key. Did you mean 'use_bn'",
    ),
    "head without dims": ({"MODEL__HEAD__PARAMS": [["swav_head", {"num_clusters": [3]}]]}, "dims: must be given"),
    "unknown trunk": ({"MODEL__TRUNK__NAME": "regnt"}, "Did you mean 'regnet'"),
    "regnet by name and numbers": ({"MODEL__TRUNK__REGNET__name": "regnet_y_400mf"}, "not both"),
    "regnet without blocks": (
        {"MODEL__TRUNK__REGNET__depth": 0},
        "config.MODEL.TRUNK.REGNET.depth: must be at least 1",
    ),
    "regnet without width": (
        {"MODEL__TRUNK__REGNET__group_width": 0},
        "REGNET.group_width: must be at least 1 (got 0)",
    ),
    "regnet's ratio": ({"MODEL__TRUNK__REGNET__w_m": 1.0}, "config.MODEL.TRUNK.REGNET.w_m: must be above 1 (got 1.0)"),
    "frozen": ({"MODEL__TEMP_FROZEN_PARAMS_ITER_MAP": ["nope"]}, "must hold pairs of a parameter's name and a number"),
    "seed": ({"SEED_VALUE": 2**63}, "config.SEED_VALUE: must be at most 9223372036854775807"),
    "regnet in part": ({"MODEL__TRUNK__REGNET__w_0": None}, "Add w_0, or write name: regnet_y_400mf"),
    "timm without a model": ({"MODEL__TRUNK__NAME": "timm"}, "must say the model: timm/<model>"),
    "timm's name twice": (
        {"MODEL__TRUNK__NAME": "timm/resnet18", "MODEL__TRUNK__PARAMS": {"name": "resnet18"}},
        "must say the model: timm/<model>",
    ),
    "timm's keys": (
        {"MODEL__TRUNK__NAME": "timm/resnet18", "MODEL__TRUNK__PARAMS": {"drop_path": 1}},
        "config.MODEL.TRUNK.PARAMS.drop_path",
    ),
    "scale of VISSL's attention": (
        {"MODEL__TRUNK__VISION_TRANSFORMERS__QK_SCALE": 0.1},
        "config.MODEL.TRUNK.VISION_TRANSFORMERS.QK_SCALE",
    ),
    "resnet depth": ({"MODEL__TRUNK__NAME": "resnet", "MODEL__TRUNK__RESNETS__DEPTH": 51}, "must be 18 or 34 or 50"),
    "keys for a user's own trunk": ({"MODEL__TRUNK__PARAMS": {"a": 1}}, "is for trunks of your own"),
    "optimizer": ({"OPTIMIZER__name": "adma"}, "Did you mean 'adam'"),
    "epochs": ({"OPTIMIZER__num_epochs": 0}, "config.OPTIMIZER.num_epochs: must be at least 1"),
    "betas": ({"OPTIMIZER__betas": [0.9, 1.0]}, "config.OPTIMIZER.betas: must be two numbers from 0 to below 1"),
    "optimizer's own keys": ({"OPTIMIZER__PARAMS": {"epz": 1}}, "PARAMS.epz: is not a key. Did you mean 'eps'?"),
    "nesterov": (
        {"OPTIMIZER__name": "sgd", "OPTIMIZER__nesterov": True, "OPTIMIZER__momentum": 0.0},
        "needs a momentum above 0",
    ),
    "LARC on LARS": ({"OPTIMIZER__name": "lars", "OPTIMIZER__use_larc": True}, "cannot be put on top of lars"),
    "schedule": ({"OPTIMIZER__param_schedulers__lr__name": "cosin"}, "param_schedulers.lr.name: must be a known"),
    "interval": ({"OPTIMIZER__param_schedulers__lr__update_interval": "day"}, "must be step or epoch (got 'day')"),
    "slurm": ({"SLURM__USE_SLURM": True, "SLURM__NAME": " "}, "config.SLURM.NAME: must have a letter"),
    "checkpoint frequency": (
        {"CHECKPOINT__KEEP_LAST": 0},
        "config.CHECKPOINT.KEEP_LAST: must be -1 or at least 1 (got 0)",
    ),
    "resume from": (
        {"CHECKPOINT__LATEST_CHECKPOINT_RESUME_FILE_NUM": 0},
        "RESUME_FILE_NUM: must be at least 1",
    ),
    "time limit": ({"CHECKPOINT__TIME_LIMIT_MIN": 0.0}, "config.CHECKPOINT.TIME_LIMIT_MIN: must be above 0"),
    "restarts": (
        {"DISTRIBUTED__MAX_RESTARTS": 2, "CHECKPOINT__AUTO_RESUME": False},
        "config.DISTRIBUTED.MAX_RESTARTS: needs AUTO_RESUME",
    ),
    "fewer processes on several machines": (
        {"DISTRIBUTED__MIN_PROC_PER_NODE": 1, "DISTRIBUTED__NUM_NODES": 2, "DISTRIBUTED__RUN_ID": "10.0.0.1:29500"},
        "config.DISTRIBUTED.MIN_PROC_PER_NODE: must be -1 with more than one machine",
    ),
    "fewer processes": ({"DISTRIBUTED__MIN_PROC_PER_NODE": 9}, "config.DISTRIBUTED.MIN_PROC_PER_NODE: must be -1, or"),
    "hook": ({"HOOKS__EXTRA": ["nope"]}, "config.HOOKS.EXTRA: must be a known hook"),
    "a teacher that there is not": (
        {"EVALUATED_MODEL": "teacher"},
        "config.EVALUATED_MODEL: must be student: swav_loss has no teacher that follows the model (got teacher)",
    ),
    "a teacher of weights that are one model": (
        {"EVALUATED_MODEL": "teacher", "TEST_ONLY": True},
        "Name the momentum copy itself as the weights: <run folder>/weights_teacher.safetensors.",
    ),
    "VISSL's key": (
        {"MODEL__FEATURE_EVAL_SETTINGS__EXTRACT_TRUNK_FEATURES_ONLY": True},
        "EXTRACT_TRUNK_FEATURES_ONLY: needs EVAL_MODE_ON (got True)",
    ),
    "frozen trunk outside evaluation": (
        {"MODEL__FEATURE_EVAL_SETTINGS__FREEZE_TRUNK_ONLY": True},
        "config.MODEL.FEATURE_EVAL_SETTINGS.FREEZE_TRUNK_ONLY: needs EVAL_MODE_ON",
    ),
    "scales of crops": (
        {
            "DATA__TRAIN__TRANSFORMS": [
                {"name": "ImgPilToMultiCrop", "num_crops": [2], "size_crops": [16], "crop_scales": [[1.0, 0.5]]}
            ]
        },
        "ImgPilToMultiCrop.crop_scales: must list pairs of shares, the smaller one first",
    ),
    "nothing to mix": (
        {
            "DATA__TRAIN__COLLATE_FUNCTION": "cutmixup_collator",
            "DATA__TRAIN__COLLATE_FUNCTION_PARAMS": {"mixup_alpha": 0.0, "cutmix_alpha": 0.0},
        },
        "COLLATE_FUNCTION_PARAMS: must have a mixup_alpha or a cutmix_alpha above 0, or cutmix_minmax",
    ),
    "boxes to cut": (
        {
            "DATA__TRAIN__COLLATE_FUNCTION": "cutmixup_collator",
            "DATA__TRAIN__COLLATE_FUNCTION_PARAMS": {"cutmix_minmax": [0.8, 0.2]},
        },
        "COLLATE_FUNCTION_PARAMS.cutmix_minmax: must be two shares of the side, the smaller first",
    ),
    "hinge": (
        {"PROGRAM": "train_svm", "SVM__loss": "hinge", "SVM__dual": False},
        "config.SVM.dual: must be true with loss hinge (got false)",
    ),
    "l1": (
        {"PROGRAM": "train_svm", "SVM__penalty": "l1", "SVM__dual": True},
        "config.SVM.penalty: must be l2 unless dual is false and loss is squared_hinge",
    ),
    "costs": (
        {"PROGRAM": "train_svm", "SVM__costs__base": 2.0, "SVM__costs__power_range": [4, 4]},
        "config.SVM.costs.power_range: must be two exponents, the smaller one first (got [4, 4])",
    ),
    "no costs": (
        {"PROGRAM": "train_svm", "SVM__costs__base": -1.0, "SVM__costs__costs_list": []},
        "config.SVM.costs.costs_list: must list a cost",
    ),
    "order of colors": (
        {"MODEL__INPUT_TYPE": "lab"},
        "config.MODEL.INPUT_TYPE: must be rgb for regnet (got lab). Trunks for lab: resnet, alexnet_colorization.",
    ),
    "colorization": (
        {"MODEL__TRUNK__NAME": "alexnet_colorization"},
        "config.MODEL.INPUT_TYPE: must be lab for alexnet_colorization (got rgb)",
    ),
    "LoRA from nothing": (
        {"MODEL__LORA__USE_LORA": True},
        "config.MODEL.LORA.USE_LORA: needs weights to begin with, because the trunk stays frozen",
    ),
    "LoRA without layers": (
        {"MODEL__LORA__USE_LORA": True, "MODEL__LORA__TARGET_MODULES": []},
        "config.MODEL.LORA.TARGET_MODULES: must be a list of names of layers, or one regular expression",
    ),
    "heads of a sweep": (
        {
            "MODEL__HEAD__PARAMS": [["mlp", {"dims": [64, 10]}], ["mlp", {"dims": [64, 10]}]],
            "OPTIMIZER__head_optimizer_params__lr_factors": [1.0, 2.0],
        },
        "config.MODEL.HEAD.PARAMS: must be one head, as config.OPTIMIZER.head_optimizer_params.lr_factors is given",
    ),
    "sweep without a frozen trunk": (
        {"OPTIMIZER__head_optimizer_params__lr_factors": [1.0, 2.0]},
        "lr_factors: needs a frozen trunk: else the heads would share one",
    ),
    "sweep with clipping": (
        {"OPTIMIZER__head_optimizer_params__lr_factors": [1.0, 2.0], "ZERO__clip_grad": 1.0},
        "lr_factors: cannot go with clipping, which joins the heads' gradients",
    ),
    "features of views that never come again": (
        {"DISTILLATION__CACHE_FEATURES": True},
        "config.DISTILLATION.CACHE_FEATURES: must be false: swav_loss has no teacher that gives the same",
    ),
    "channels of the model": (
        {"DATA__IN_CHANNELS": 4, "MODEL__IN_CHANNELS": 5},
        "config.MODEL.IN_CHANNELS: must be that of config.DATA.IN_CHANNELS, 4 (got 5)",
    ),
    "sbatch's option": (
        {"SLURM__USE_SLURM": True, "SLURM__ADDITIONAL_PARAMETERS": {"ntasks": 4}},
        "config.SLURM.ADDITIONAL_PARAMETERS.ntasks: is decided by another key",
    ),
    "meters": ({"METERS__names": ["mean_ap_list_meter"]}, "each image has one class here (got mean_ap_list_meter)"),
    "weights that are not there": (
        {"MODEL__WEIGHTS_INIT__PARAMS_FILE": "/none.torch"},
        "config.MODEL.WEIGHTS_INIT.PARAMS_FILE: must name a run folder, a checkpoint or a file of weights that exists",
    ),
    **{
        f"address {address}": (
            {"DISTRIBUTED__NUM_NODES": 2, "DISTRIBUTED__RUN_ID": address},
            f"config.DISTRIBUTED.RUN_ID: must be <address of machine 0>:<port> (got '{address}'). Write such as",
        )
        for address in ("node0", ":29500", "node0:0", "node0:65536", "node0:http")
    },
    "entry of taps": (
        {f"{TAPS}LINEAR_EVAL_FEAT_POOL_OPS_MAP": [["res5", ["Identity"]]], **TAPPED},
        "LINEAR_EVAL_FEAT_POOL_OPS_MAP: must list [layer, [pooling, [arguments]]] (got ['res5', ['Identity']])",
    ),
    **{
        f"pooling {name}": (
            {f"{TAPS}LINEAR_EVAL_FEAT_POOL_OPS_MAP": [["res5", [name, []]]], **TAPPED},
            "must name a pooling: AdaptiveAvgPool2d, AdaptiveMaxPool2d, AvgPool2d, MaxPool2d, Identity "
            f"(got '{name}'). {fix}",
        )
        for name, fix in (("zzz", "Choose one of them."), ("Identty", "Did you mean 'Identity'?"))
    },
    "stages of Swin": (
        {"MODEL__TRUNK__NAME": "swin_transformer", "MODEL__TRUNK__SWIN_TRANSFORMER__DEPTHS": [2, 2]},
        "DEPTHS: must have as many entries as NUM_HEADS, 4 (got [2, 2]). Write both for each stage.",
    ),
    "heads of taps": (
        {f"{TAPS}LINEAR_EVAL_FEAT_POOL_OPS_MAP": [["res4", ["Identity", []]], ["res5", ["Identity", []]]], **TAPPED},
        "config.MODEL.HEAD.PARAMS: must list a head for each of the 2 layers of config.MODEL.FEATURE_EVAL_SETTINGS."
        "LINEAR_EVAL_FEAT_POOL_OPS_MAP (got 1 heads). Give the lists the same length.",
    ),
    "taps and a sweep": (
        {
            f"{TAPS}LINEAR_EVAL_FEAT_POOL_OPS_MAP": [["res5", ["Identity", []]]],
            "OPTIMIZER__head_optimizer_params__lr_factors": [1.0, 2.0],
            **TAPPED,
        },
        "LINEAR_EVAL_FEAT_POOL_OPS_MAP: cannot go with head_optimizer_params.lr_factors: one head each (got a map)",
    ),
    "peak of one's own schedule": (
        {"OPTIMIZER__lr": 0.1, "OPTIMIZER__param_schedulers__lr__name": "mine"},
        "config.OPTIMIZER.lr: must be left out: the schedule mine is not one that can be scaled (got 0.1). Write the "
        "rate into config.OPTIMIZER.param_schedulers.lr.",
    ),
    **{
        f"crops {counts} of {sizes}": (
            {"DATA__TRAIN__TRANSFORMS": [crops(counts, sizes)]},
            f"ImgPilToMultiCrop: must list whole numbers, at least 1 (got num_crops {counts}, size_crops {sizes})",
        )
        for counts, sizes in ((2, [8]), ([2], 8), ([], [8]), ([0], [8]), ([2], [0]), ([1.5], [8]))
    },
    "pairs without a folder": (
        {"DATA__TRAIN__DATA_SOURCES": ["segmentation_folder"], "DATA__TRAIN__DATA_PATHS": []},
        "config.DATA.TRAIN.DATA_PATHS: must name a folder with images and masks (got []). Write "
        "config.DATA.TRAIN.DATA_PATHS=[/path/to/folder], with images/ and masks/ in it.",
    ),
    "two sources": (
        {"DATA__TRAIN__DATA_SOURCES": ["digits", "synthetic"]},
        "config.DATA.TRAIN.DATA_SOURCES: must name one data source (got ['digits', 'synthetic'])",
    ),
    "classes of pixels": (
        {"DATA__TRAIN__DATASET_NAMES": ["VOC_SEGMENTATION"]},
        "config.DATA.TRAIN.DATASET_NAMES: must have a class for each image: this one has classes of pixels",
    ),
    "name without a catalog": (
        {"DATA__TRAIN__DATA_SOURCES": ["disk_folder"], "DATA__TRAIN__DATASET_NAMES": ["flowers"]},
        "config.DATA.TRAIN.DATASET_NAMES: must be in a dataset catalog, because no DATA_PATHS are given",
    ),
    "mean with a text": (
        {"DATA__TRAIN__TRANSFORMS": [{"name": "Normalize", "mean": [0.5, "a", 0.5], "std": [0.5] * 3}]},
        "Normalize.mean: must be 3 numbers, one for each of red, green and blue (got [0.5, 'a', 0.5])",
    ),
    "file of labels": (
        {"DATA__TRAIN__LABEL_PATHS": ["/none.npy"]},
        "config.DATA.TRAIN.LABEL_PATHS: must name files that exist (got '/none.npy')",
    ),
    "one width": (
        {"MODEL__HEAD__PARAMS": [["mlp", {"dims": [64]}]]},
        "config.MODEL.HEAD.PARAMS[0][1].dims: must be two or more widths, from the trunk's features (-1: as many as "
        "it has) to the outputs (-1: as many as there are classes) (got [64])",
    ),
    "no outputs": ({"MODEL__HEAD__PARAMS": [["mlp", {"dims": [64, 0]}]]}, "dims: must be two or more widths"),
    "block of no loss": ({"LOSS__zzz": {}}, "config.LOSS.zzz: is not the name of a loss. Known: CrossEntropyLoss, "),
    "loss as a value": (
        {"LOSS__swav_loss": 3},
        "config.LOSS.swav_loss: must be a block of keys (got 3). Write config.LOSS.swav_loss.<key>=<value>.",
    ),
    "objective": ({"OBJECTIVE": "los_last"}, "config.OBJECTIVE: must name a number of summary.json (got 'los_last')"),
    "best by a figure that is not measured": (
        {"CHECKPOINT__SAVE_BEST": True, "CHECKPOINT__BEST_METRIC": "miou"},
        "config.CHECKPOINT.BEST_METRIC: must be a figure that this run measures (loss",
    ),
    "what may change": (
        {"CHECKPOINT__ALLOW_CHANGED": ["zzz"]},
        "must name keys or blocks (got 'zzz'). Write it as the refused resume printed it, such as LOSS.name.",
    ),
}


def test_quickstart_has_no_problem():
    assert complaints(CPU_HOST) == []
    assert complaints(GPU_HOST) == []


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_says_what_and_how(name):
    values, text = REFUSALS[name]
    found = complaints(**values)
    assert any(text in complaint for complaint in found), found


@pytest.mark.parametrize(("num_images", "said"), [(8, []), (7, ["drops every image: the 7 there are"])])
def test_images_of_one_step_are_enough_to_drop_the_rest(num_images, said):
    train = {"BATCHSIZE_PER_REPLICA": 4, "DROP_LAST": True, "DATA_SOURCES": ["synthetic"], "DATA_LIMIT": num_images}
    values = {f"DATA__TRAIN__{key}": value for key, value in train.items()}
    found = complaints(**values, DISTRIBUTED__NUM_PROC_PER_NODE=2)
    assert len(found) == len(said) and all(text in one for text, one in zip(said, found, strict=True)), found


def test_a_data_source_may_insist_on_its_own_labels():
    assert complaints(DATA__TRAIN__LABEL_SOURCES=["digits"]) == []
    (complaint,) = complaints(DATA__TRAIN__LABEL_SOURCES=["digts"])
    assert "Did you mean 'digits'" in complaint


def test_all_problems_are_reported_together():
    found = complaints(ZERO__LEVEL=9, LOSS__name="nope", MODEL__TRUNK__NAME="nope", OPTIMIZER__num_epochs=0)
    assert len(found) == 4


def test_a_number_decides_between_both_switches():
    switches = {"MODEL__SHARDED_DDP_SETUP__USE_SDP": True, "MODEL__FSDP_CONFIG__AUTO_SETUP_FSDP": True}
    assert complaints(ZERO__LEVEL=2, **switches) == []


def test_equal_clips_are_fine():
    assert complaints(ZERO__clip_grad=1.0, MODEL__GRAD_CLIP__USE_GRAD_CLIP=True) == []


def test_gpus_are_counted():
    found = complaints(GPU_HOST, MACHINE__DEVICE="gpu", DISTRIBUTED__NUM_PROC_PER_NODE=4)
    assert found == [
        "config.DISTRIBUTED.NUM_PROC_PER_NODE: must be at most the number of GPUs, 2 (got 4). "
        "Write config.DISTRIBUTED.NUM_PROC_PER_NODE=2, or config.MACHINE.DEVICE=cpu."
    ]


def test_gpus_do_not_talk_by_gloo():
    assert complaints(GPU_HOST, MACHINE__DEVICE="gpu", DISTRIBUTED__BACKEND="nccl") == []
    (complaint,) = complaints(GPU_HOST, MACHINE__DEVICE="gpu", DISTRIBUTED__BACKEND="gloo")
    assert "config.DISTRIBUTED.BACKEND: must be nccl on GPUs (got 'gloo')" in complaint


@pytest.mark.parametrize("port", [1, 65535])
def test_every_port_is_a_place_to_meet(port):
    assert complaints(DISTRIBUTED__NUM_NODES=2, DISTRIBUTED__RUN_ID=f"node0:{port}") == []


def test_a_figure_of_a_meter_or_of_a_hook_may_be_searched_for():
    assert complaints(OBJECTIVE="loss_last") == []
    assert "OBJECTIVE" in str(complaints(OBJECTIVE="mine"))
    assert "OBJECTIVE" not in str(complaints(OBJECTIVE="mine", HOOKS__EXTRA=["own"]))
    assert "OBJECTIVE" in str(complaints(OBJECTIVE="not a name", HOOKS__EXTRA=["own"]))


def test_torchrun_allows_several_machines():
    assert complaints(Host(num_cores=8, torchrun=(4, 2)), DISTRIBUTED__NUM_NODES=2) == []


def disk_folder(*paths):
    return {"DATA__TRAIN__DATA_SOURCES": ["disk_folder"], "DATA__TRAIN__DATA_PATHS": list(map(str, paths))}


def test_missing_path_names_the_closest(tmp_path):
    (tmp_path / "photos").mkdir()
    (found,) = complaints(**disk_folder(tmp_path / "fotos" / "2024"))
    assert f"must name a folder that exists (got '{tmp_path}/fotos/2024')" in found
    assert "Did you mean 'photos'?" in found


def test_empty_folder_and_file_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    (tmp_path / "a.jpg").touch()
    empty, file = complaints(**disk_folder(tmp_path / "empty", tmp_path / "a.jpg"))
    assert "must name a folder that holds images" in empty
    assert (
        f"must name a folder, not a file (got '{tmp_path}/a.jpg'). Name the folder that holds it, {tmp_path}," in file
    )
    assert ".csv" in file


def test_a_file_beside_the_working_directory_names_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "make.py").touch()
    (file,) = complaints(**disk_folder("make.py"))
    assert f"Name the folder that holds it, {tmp_path}, or files of one kind: .csv" in file


def test_only_folders_and_files_of_images_are_proposed(tmp_path):
    for name in ("photos.sh", "photos.csv"):
        (tmp_path / name).touch()
    (found,) = complaints(**disk_folder(tmp_path / "photo"))
    assert found.endswith("in it does not. Did you mean 'photos.csv'?")


def test_images_are_counted_without_being_opened(tmp_path):
    for index in range(3):
        (tmp_path / f"{index}.JPG").touch()  # empty: opening one would fail
    (found,) = complaints(**disk_folder(tmp_path), DISTRIBUTED__NUM_PROC_PER_NODE=4)
    assert "at most the number of images, 3" in found


def test_endings_of_jpeg_are_all_read_and_no_ending_is_called_unread():
    jpeg = {ending for ending, form in Image.registered_extensions().items() if form == "JPEG"}
    assert {".jfif", ".jpe"} < jpeg <= {*EXTENSIONS} and not {*EXTENSIONS} & {*PICTURES}


COMPOSITES = {
    "lengths": ({"lengths": [0.5, 0.4]}, "lengths: must be positive and sum to 1"),
    "numbers of parts": ({"lengths": [1.0]}, "must have a length and an interval_scaling per part"),
    "part": (
        {"schedulers": [{"name": "linaer"}, {"name": "constant", "value": 1.0}]},
        "schedulers[0].name: must be a known",
    ),
    "part's key": (
        {"schedulers": [{"name": "constant"}, {"name": "constant", "value": 1.0}]},
        "[0].value: must be given",
    ),
    "scaling": ({"interval_scaling": ["fixed", "stretched"]}, "must be rescaled or fixed"),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_composite_schedules_are_checked(name):
    change, text = COMPOSITES[name]
    good = {
        "schedulers": [{"name": "linear", "start_value": 0.0, "end_value": 1.0}, {"name": "constant", "value": 1.0}],
        "lengths": [0.5, 0.5],
        "interval_scaling": ["rescaled", "fixed"],
    }
    base = "OPTIMIZER__param_schedulers__lr__"
    assert complaints(**{f"{base}name": "composite"}, **{base + key: value for key, value in good.items()}) == []
    found = complaints(**{f"{base}name": "composite"}, **{base + key: value for key, value in (good | change).items()})
    assert any(text in complaint for complaint in found), found


def test_milestones_fit_the_run():
    base = "OPTIMIZER__param_schedulers__lr__"
    (found,) = complaints(**{f"{base}name": "multistep", "OPTIMIZER__num_epochs": 50})
    assert "milestones: must lie before the end" in found


@pytest.mark.parametrize(
    ("head", "dims", "is_refused"),
    [
        *(("mlp", dims, False) for dims in ([1, 1], [-1, 1], [-1, -1], [8, 1, 4])),
        *(("mlp", dims, True) for dims in ([], [8], [-1], [0, 4], [-2, 4], [8, 0], [8, -2], [8, 0, 4], [8, -1, 4])),
        ("swav_head", [8, -1], True),
        ("swav_head", [8, 1], False),
    ],
)
def test_widths_of_a_head_are_at_least_one(head, dims, is_refused):
    assert bool(_widths(head, dims, "config.MODEL.HEAD.PARAMS")) == is_refused


@pytest.mark.parametrize(
    ("ends", "flags", "is_refused"),
    [
        ([[1, 2]], [[True, False]], False),
        ([[1, 2]], [[True, True]], False),
        ([[1, 2]], [[False, False]], False),
        ([[1, 2]], [[]], False),
        ([[1], [2]], [[True], []], False),
        ([[1, 2]], [[False, True]], True),
        ([[1, 2]], [[True]], True),
        ([[1]], [[True], [True]], True),
    ],
)
def test_flags_of_checkpointing_problem_are_as_many_and_true_ones_first(ends, flags, is_refused):
    block = RegNetBlock(stage_checkpoints=ends, stage_checkpointing=flags)
    assert bool(_checkpointing_problem(block, "config.MODEL.TRUNK.REGNET")) == is_refused


@pytest.mark.parametrize(
    ("key", "allowed", "refused"),
    [
        ("mixup_alpha", (0, 2), (-0.1, 2.1)),
        ("cutmix_alpha", (0, 2), (-0.1, 2.1)),
        ("prob", (0, 1), (-0.1, 1.1)),
        ("switch_prob", (0, 1), (-0.1, 1.1)),
        ("label_smoothing", (0, 0.9), (-0.1, 1)),
        ("num_classes", (1, 2**31), (0, 2**31 + 1)),
        ("mode", ("batch", "pair", "elem"), ("", "rows")),
        ("ssl_method", ("",), ("swav", "simclr", "mae")),
    ],
)
def test_limits_of_mixing(key, allowed, refused):
    for value in (*allowed, *refused):
        params = {"cutmix_minmax": [0.2, 0.8], key: value}
        values = {"DATA__TRAIN__COLLATE_FUNCTION": "cutmixup_collator", "DATA__TRAIN__COLLATE_FUNCTION_PARAMS": params}
        found = [text for text in complaints(LOSS__name="CrossEntropyLoss", **values) if f"PARAMS.{key}:" in text]
        assert bool(found) == (value in refused), (value, found)


def test_every_part_of_a_plan_is_frozen():
    """What is decided once stays so: later code reads it from the plan."""
    parts = [part for part in vars(resolved).values() if is_dataclass(part) and part.__module__ == resolved.__name__]
    assert len(parts) >= 7 and all(part.__dataclass_params__.frozen for part in parts)


@pytest.mark.parametrize(
    ("keys", "is_refused"),
    [
        ({"mixup_alpha": 0.5}, False),
        ({"mixup_alpha": 0.0, "cutmix_alpha": 0.5}, False),
        ({"mixup_alpha": 0.0, "cutmix_minmax": [0.2, 0.8]}, False),
        ({"mixup_alpha": 0.0}, True),
    ],
)
def test_something_must_mix(keys, is_refused):
    values = {"DATA__TRAIN__COLLATE_FUNCTION": "cutmixup_collator", "DATA__TRAIN__COLLATE_FUNCTION_PARAMS": keys}
    found = complaints(LOSS__name="CrossEntropyLoss", **values)
    assert any("must have a mixup_alpha" in text for text in found) == is_refused, found
