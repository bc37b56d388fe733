"""The quickstart with a narrower trunk, for tests of everything but the model: a third of its time."""

from __future__ import annotations

SMALL_TRUNK = [
    "config.MODEL.TRUNK.REGNET.stem_width=16",
    "config.MODEL.TRUNK.REGNET.group_width=16",
    "config.MODEL.TRUNK.REGNET.w_0=16",
    "config.MODEL.TRUNK.REGNET.w_a=16.0",
    "config.MODEL.HEAD.PARAMS=[[swav_head, {dims: [-1, 32, 16], use_bn: true, num_clusters: [60]}]]",
]
