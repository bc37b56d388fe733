"""Device, backend, ranks and threads for several hosts; the sharding plan that follows."""

from __future__ import annotations

import pytest

from tests.unit.config.example_config import CPU_HOST, GPU_HOST, config
from vissl_zero.config.derive.placement_plan import global_batch, placement
from vissl_zero.config.derive.sharding_plan import sharding_plan
from vissl_zero.config.host import Host, _shares, idle_cores, this_host, torchrun_ranks
from vissl_zero.errors import ConfigError

NCCL = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("host", "values", "device", "backend"),
    [
        (CPU_HOST, {}, "cpu", "gloo"),
        (GPU_HOST, {}, "cuda", NCCL),
        (GPU_HOST, {"MACHINE__DEVICE": "cpu"}, "cpu", "gloo"),
        (GPU_HOST, {"MACHINE__DEVICE": "gpu"}, "cuda", NCCL),
        (GPU_HOST, {"DISTRIBUTED__BACKEND": "gloo"}, "cpu", "gloo"),
        (GPU_HOST, {"DISTRIBUTED__NUM_PROC_PER_NODE": 3}, "cpu", "gloo"),
    ],
)
def test_device_and_backend(host, values, device, backend):
    place = placement(config(**values), host)
    assert (place.device, place.backend) == (device, backend)


def test_notes_say_why_the_cpu_is_used():
    (crowded,) = placement(config(DISTRIBUTED__NUM_PROC_PER_NODE=3), GPU_HOST).notes
    assert crowded == "3 processes do not fit on 2 GPU(s), so the CPU is used."
    (nccl,) = placement(config(DISTRIBUTED__BACKEND="nccl"), CPU_HOST).notes
    assert nccl == "config.DISTRIBUTED.BACKEND: nccl needs GPUs; gloo is used on the CPU."


def test_ranks_and_threads():
    place = placement(config(), Host(num_cores=5))
    assert (place.world_size, place.procs_per_node, place.num_nodes, place.threads_per_rank) == (2, 2, 1, 2)
    assert placement(config(TRAINER__THREADS_PER_RANK=7), Host(num_cores=5)).threads_per_rank == 7
    assert placement(config(), Host(num_cores=1)).threads_per_rank == 1


def test_threads_look_at_the_load_and_at_what_the_user_says():
    busy = Host(num_cores=8, num_idle_cores=3)
    place = placement(config(DISTRIBUTED__NUM_PROC_PER_NODE=2), busy)
    assert place.threads_per_rank == 1 and "3 of 8 cores idle" in place.notes[0]
    assert placement(config(DISTRIBUTED__NUM_PROC_PER_NODE=1), busy).threads_per_rank == 3
    fixed = placement(config(TRAINER__DETERMINISTIC=True), busy)  # its bits must not depend on the load
    assert fixed.threads_per_rank == 4 and fixed.notes == ()
    asked = placement(config(), Host(num_cores=8, num_idle_cores=3, num_threads=2))
    assert asked.threads_per_rank == 2 and asked.notes == ()
    assert this_host({"OMP_NUM_THREADS": "5"}).num_threads == 5
    assert this_host({"OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}).num_threads is None


def test_idle_cores_are_counted_from_the_machines_ticks(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    ticks = iter(["cpu 100 0 0 100 0 0 0 0", "cpu 250 0 0 150 0 0 0 0"])  # a quarter of the time idle
    monkeypatch.setattr(type(stat), "read_text", lambda self: next(ticks))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert idle_cores(Host(num_cores=8), seconds=0, stat=stat) == 2
    monkeypatch.undo()
    assert idle_cores(Host(num_cores=8), seconds=0, stat=tmp_path / "absent") is None


def test_every_control_group_above_a_process_counts(tmp_path):
    root, own = tmp_path / "cgroup", tmp_path / "own"
    (root / "a/b").mkdir(parents=True)
    (root / "cpu/c").mkdir(parents=True)
    (root / "a/cpu.max").write_text("300000 100000\n")
    (root / "a/b/cpu.max").write_text("max 100000\n")
    (root / "cpu/c/cpu.cfs_quota_us").write_text("150000\n")
    (root / "cpu/c/cpu.cfs_period_us").write_text("100000\n")
    own.write_text("4:memory:/m\n1:cpu,cpuacct:/c\n0::/a/b\n")
    assert list(_shares(root, own)) == [1.5, 3.0]


def test_torchrun_decides_the_ranks():
    host = Host(num_cores=8, torchrun=torchrun_ranks({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"} | LOCAL_2))
    place = placement(config(), host)
    assert (place.world_size, place.procs_per_node, place.num_nodes) == (4, 2, 2)
    assert torchrun_ranks({"RANK": "0"}) is None
    (restarts,) = placement(config(DISTRIBUTED__MAX_RESTARTS=1), host).notes
    assert "MAX_RESTARTS has no effect under torchrun, which has --max-restarts" in restarts


@pytest.mark.parametrize("spoilt", [{"RANK": "x"}, {"WORLD_SIZE": "-2"}, {"LOCAL_WORLD_SIZE": "x"}, {"RANK": "4"}])
def test_numbers_of_processes_that_make_no_sense_are_refused(spoilt: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"must number the processes of a run .*Unset them"):
        torchrun_ranks({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"} | LOCAL_2 | spoilt)


LOCAL_2 = {"LOCAL_WORLD_SIZE": "2"}


def test_global_batch_counts_accumulation():
    assert global_batch(config(ZERO__gradient_accumulation_steps=3), CPU_HOST) == 32 * 2 * 3


def test_this_host_has_a_core():
    host = this_host({})
    assert host.num_cores >= 1
    assert host.torchrun is None
    assert bool(host.why_no_gpu) == (host.num_gpus == 0)


def plan_of(**values):
    cfg = config(**values)
    return sharding_plan(cfg, placement(cfg, CPU_HOST))


@pytest.mark.parametrize(
    ("sync", "size", "group"), [(False, -1, 0), (True, -1, 2), (True, 0, 2), (True, 1, 1), (True, 64, 2)]
)
def test_groups_of_synchronised_batch_norm(sync, size, group):
    base = "MODEL__SYNC_BN_CONFIG__"
    plan, _ = plan_of(**{f"{base}CONVERT_BN_TO_SYNC_BN": sync, f"{base}GROUP_SIZE": size})
    assert plan.sync_bn_group == group


def test_clipping_from_either_switch():
    assert plan_of()[0].clip_grad is None
    assert plan_of(ZERO__clip_grad=0.5)[0].clip_grad == 0.5
    old = {"MODEL__GRAD_CLIP__USE_GRAD_CLIP": True, "MODEL__GRAD_CLIP__MAX_NORM": 2.0}
    assert plan_of(**old)[0].clip_grad == 2.0


def test_recomputation():
    on = {"MODEL__ACTIVATION_CHECKPOINTING__USE_ACTIVATION_CHECKPOINTING": True}
    stages = {"MODEL__TRUNK__REGNET__stage_checkpoints": [[2], []]}
    assert plan_of()[0].checkpoint_every == 0
    assert plan_of(**on, MODEL__ACTIVATION_CHECKPOINTING__EVERY_N_BLOCKS=3)[0].checkpoint_every == 3
    plan, _ = plan_of(**on, **stages)
    assert (plan.checkpoint_every, plan.stage_checkpoints) == (0, ((2,), ()))
    plan, notes = plan_of(**stages)
    assert plan.stage_checkpoints == ()
    assert "stage_checkpoints has no effect" in notes[0]


def test_keys_of_fairscale_are_said_to_have_no_effect():
    _, notes = plan_of(MODEL__FSDP_CONFIG__bucket_cap_mb=25.0, MODEL__SHARDED_DDP_SETUP__reduce_buffer_size=1)
    assert notes == (
        "config.MODEL.SHARDED_DDP_SETUP.reduce_buffer_size has no effect on the torch engine.",
        "config.MODEL.FSDP_CONFIG.bucket_cap_mb has no effect on the torch engine.",
    )


def test_loss_scaling_without_float16_is_said_to_have_no_effect():
    assert "dynamic_loss_scale has no effect" in plan_of(ZERO__dynamic_loss_scale=False)[1][0]


def test_keys_of_an_offload_that_is_off_are_said_to_have_no_effect():
    _, notes = plan_of(ZERO__offload_param_config__nvme_path="/nvme")
    assert notes == ("config.ZERO.offload_param_config has no effect: its device is none.",)
