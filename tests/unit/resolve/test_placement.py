"""Device, backend, ranks and threads for several hosts; the sharding plan that follows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.config.example_config import CPU_HOST, GPU_HOST, config
from vissl_zero.errors import ConfigError
from vissl_zero.resolve.decisions import Decisions
from vissl_zero.resolve.host import (
    Host,
    _shares,
    available_memory,
    free_memory,
    idle_cores,
    num_oom_kills,
    settled_free_memory,
    this_host,
    torchrun_ranks,
)
from vissl_zero.resolve.placement_plan import placement
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.resolve.sharding_plan import sharding_plan

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


def test_a_machines_memory_is_for_dry_runs():
    text = "config.MACHINE.MEMORY_GIB has an effect on dry runs only."
    assert placement(config(MACHINE__MEMORY_GIB=4.0), CPU_HOST).notes == (text,)
    assert placement(config(MACHINE__MEMORY_GIB=4.0, DRY_RUN=True), CPU_HOST).notes == ()


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


def test_only_a_dry_run_assumes_a_machine_that_is_not_here():
    gpus: dict[str, Any] = {
        "DATA__TRAIN__BATCHSIZE_PER_REPLICA": 8,
        "MACHINE__DEVICE": "gpu",
        "DISTRIBUTED__NUM_PROC_PER_NODE": 20,
    }
    assumed = resolve(config(**gpus, DRY_RUN=True), "/nowhere")
    assert (assumed.device, assumed.world_size) == ("cuda", 20)
    with pytest.raises(ConfigError, match=r"config\.(MACHINE\.DEVICE|DISTRIBUTED\.NUM_PROC_PER_NODE): "):
        resolve(config(**gpus), "/nowhere")


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


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


GIB = 2**30


@pytest.mark.parametrize("version", [1, 2])
def test_memory_groups_of_a_process_and_above_it_count_in_both_versions(tmp_path, version):
    """The smallest limit, and the group with least left; files that are cached go first."""
    root, own, info = tmp_path / "groups", tmp_path / "own", tmp_path / "meminfo"
    info.write_text(f"MemTotal: 900 kB\nMemAvailable: {2**40} kB\n")
    if version == 1:
        own.write_text("5:cpu,cpuacct:/x\n4:memory:/a/b\n0::/\n")
        none, names = 9223372036854771712, ("memory__limit_in_bytes", "memory__usage_in_bytes")
        top, cached = root / "memory", "cache 5\ninactive_file 5\ntotal_inactive_file {}\n"
    else:
        own.write_text("0::/a/b\n")
        none, names = "max", ("memory__max", "memory__current")
        top, cached = root, "anon 5\ninactive_file {}\n"
    for place, limit, used, files in (
        (top, none, 3 * GIB, 0),
        (top / "a", GIB, GIB // 2, GIB // 4),  # three quarters are left
        (top / "a/b", 2 * GIB, GIB, 0),
    ):
        group(place, **dict(zip(names, (str(limit), str(used)), strict=True)), memory__stat=cached.format(files))
    assert available_memory(root, own) == GIB
    assert free_memory(root, own, info) == GIB * 3 // 4
    group(top / "a/b", **{names[0]: str(GIB // 2), names[1]: str(GIB // 2 - 100)})
    assert available_memory(root, own) == GIB // 2
    assert free_memory(root, own, info) == 100
    group(top / "a/b", **{names[1]: str(GIB)})
    assert free_memory(root, own, info) == 0


def test_a_container_finds_its_own_group_at_the_top(tmp_path):
    """Its files lie there; the name is that of the machine outside."""
    root, own = tmp_path / "groups", tmp_path / "own"
    own.write_text("4:memory:/docker/0123\n")
    group(root / "memory", memory__limit_in_bytes="1000", memory__oom_control="oom_kill_disable 0\noom_kill 3\n")
    assert available_memory(root, own) == 1000 and num_oom_kills(root, own, tmp_path / "none") == 3


def test_kills_are_counted_in_the_group_of_the_process_else_on_the_machine(tmp_path):
    root, own, counters = (tmp_path / name for name in ("groups", "own", "vmstat"))
    counters.write_text("nr_free_pages 7\noom_kill 9\n")
    own.write_text("4:memory:/a\n0::/\n")
    assert num_oom_kills(root, own, counters) == 9
    assert num_oom_kills(root, own, tmp_path / "none") == 0
    group(root / "memory/a", memory__failcnt="4\n", memory__oom_control="oom_kill_disable 0\nunder_oom 0\n")
    assert num_oom_kills(root, own, counters) == 4  # Linux before 4.13
    group(root / "memory/a", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert num_oom_kills(root, own, counters) == 2
    own.write_text("0::/b\n")
    group(root / "b", memory__events="low 0\noom 1\noom_kill 1\n")
    assert num_oom_kills(root, own, counters) == 1


def test_memory_is_measured_until_no_more_comes_back(monkeypatch):
    found = iter([1 * GIB, 2 * GIB, 3 * GIB, 3 * GIB, 9 * GIB])
    monkeypatch.setattr("vissl_zero.resolve.host.free_memory", lambda: next(found))
    monkeypatch.setattr("vissl_zero.resolve.host._SETTLING_S", 0.0)
    assert settled_free_memory() == 3 * GIB


def test_torchrun_decides_the_ranks():
    host = Host(num_cores=8, torchrun=torchrun_ranks({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"} | LOCAL_2))
    place = placement(config(), host)
    assert (place.world_size, place.procs_per_node, place.num_nodes) == (4, 2, 2)
    assert torchrun_ranks({"RANK": "0"}) is None
    (restarts,) = placement(config(DISTRIBUTED__MAX_RESTARTS=1), host).notes
    assert "has no effect under torchrun" in restarts


@pytest.mark.parametrize(("written", "is_noted"), [(1, False), (2, False), (4, True)])
def test_a_number_of_processes_that_torchrun_overrides_is_noted_where_somebody_wrote_it(written, is_noted):
    """One process is the default, and two are what torchrun has started."""
    host = Host(num_cores=8, torchrun=torchrun_ranks({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"} | LOCAL_2))
    notes = placement(config(DISTRIBUTED__NUM_PROC_PER_NODE=written), host).notes
    assert any("NUM_PROC_PER_NODE has no effect: torchrun started 2" in note for note in notes) == is_noted


@pytest.mark.parametrize("spoilt", [{"RANK": "x"}, {"WORLD_SIZE": "-2"}, {"LOCAL_WORLD_SIZE": "x"}, {"RANK": "4"}])
def test_numbers_of_processes_that_make_no_sense_are_refused(spoilt: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"must number the processes of a run .*Unset them"):
        torchrun_ranks({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"} | LOCAL_2 | spoilt)


LOCAL_2 = {"LOCAL_WORLD_SIZE": "2"}


def test_global_batch_counts_accumulation():
    assert Decisions(config(ZERO__gradient_accumulation_steps=3), CPU_HOST).global_batch == 32 * 2 * 3


def test_this_host_has_a_core():
    host = this_host({})
    assert host.num_cores >= 1
    assert host.torchrun is None
    assert bool(host.why_no_gpu) == (host.num_gpus == 0)


def plan_of(**values):
    cfg = config(**values)
    return sharding_plan(Decisions(cfg, CPU_HOST))


@pytest.mark.parametrize(
    ("sync", "size", "group"), [(False, -1, 0), (True, -1, 2), (True, 0, 2), (True, 1, 1), (True, 64, 2)]
)
def test_groups_of_synchronized_batch_norm(sync, size, group):
    base = "MODEL__SYNC_BN_CONFIG__"
    plan, _ = plan_of(**{f"{base}CONVERT_BN_TO_SYNC_BN": sync, f"{base}GROUP_SIZE": size})
    assert plan.sync_bn_group == group


@pytest.mark.parametrize(("level", "group", "ranks"), [(0, 2, 1), (1, 2, 2), (3, -1, 4), (2, 4, 4)])
def test_ranks_that_share_one_copy(level, group, ranks):
    assert ShardingPlan(level=level, shard_group_size=group).ranks_per_copy(4) == ranks


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


def test_named_blocks_win_over_every_other_choice_of_recomputation():
    block = "MODEL__ACTIVATION_CHECKPOINTING__"
    named = {f"{block}BLOCKS": ["trunk.stages.0.0"], f"{block}EVERY_N_BLOCKS": 3}
    stages = {"MODEL__TRUNK__REGNET__stage_checkpoints": [[2], []]}
    plan, notes = plan_of(**named, **stages, **{f"{block}USE_ACTIVATION_CHECKPOINTING": True})
    assert (plan.checkpoint_blocks, plan.checkpoint_every) == (("trunk.stages.0.0",), 0)
    assert plan.stage_checkpoints == () and plan.is_recomputed
    assert [note.partition(" has no effect: ")[2] for note in notes] == ["BLOCKS says which blocks."] * 2
    plan, notes = plan_of(**named)
    assert not plan.is_recomputed and "USE_ACTIVATION_CHECKPOINTING is off" in notes[0]


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
