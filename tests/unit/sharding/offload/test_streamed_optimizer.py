"""An optimizer whose state passes through memory: the same updates, and no step on state that cannot be trusted."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from vissl_zero.optim.elementwise import adamw, sgd
from vissl_zero.sharding.offload import streamed_optimizer
from vissl_zero.sharding.offload.block_file import NUM_TRAYS, OffloadError, OffloadFolder
from vissl_zero.sharding.offload.state_place import UpdateKernel
from vissl_zero.sharding.offload.streamed_optimizer import StreamedOptimizer

BUILD = {
    "sgd": lambda groups: sgd(groups, momentum=0.9),
    "adamw": adamw,
    "torch_sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, amsgrad=True),
}


@pytest.fixture(autouse=True)
def _small_records(monkeypatch):
    monkeypatch.setattr(streamed_optimizer, "RECORD_BYTES", 8192)


def _params():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in (5000, 3, 0, 2048)]


def _groups(params):
    return [{"params": params[:2], "lr": 0.1, "weight_decay": 0.1}, {"params": params[2:], "lr": 0.01}]


def _streamed(name, path, params, is_fast_init=False):
    groups = _groups(params)
    proxies = [{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in groups]
    kernel = UpdateKernel(BUILD[name](proxies))
    folder = OffloadFolder(str(path), "vissl-zero-1", rank=0)
    return StreamedOptimizer(kernel, [group["params"] for group in groups], folder, is_fast_init)


def _set_grads(params, step, skipped=()):
    generator = torch.Generator().manual_seed(step)
    for index, param in enumerate(params):
        param.grad = None if index in skipped else torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize("is_fast_init", [False, True])
@pytest.mark.parametrize("name", BUILD)
def test_updates_are_those_of_the_base_optimizer_to_the_bit(name, is_fast_init, tmp_path):
    plain_params, params = _params(), _params()
    plain = BUILD[name](_groups(plain_params))
    streamed = _streamed(name, tmp_path, params, is_fast_init)
    for step in range(4):
        for optimizer, own in ((plain, plain_params), (streamed, params)):
            _set_grads(own, step, skipped=(1,) if step < 2 else (0,))
            optimizer.param_groups[1]["lr"] = 0.01 / (1 + step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, plain_params, strict=True))
    for ours, theirs in zip(params, plain_params, strict=True):
        if theirs.numel():
            assert streamed.state[ours].keys() == plain.state[theirs].keys()
            assert all(torch.equal(value, plain.state[theirs][key]) for key, value in streamed.state[ours].items())


@pytest.mark.timeout(30)
def test_a_collection_that_interrupts_the_start_of_a_thread_removes_files(tmp_path):
    """``threading`` holds this lock there, and takes it to join a thread."""
    streamed = _streamed("sgd", tmp_path, params := _params())
    _set_grads(params, 0)
    streamed.step()
    with threading._shutdown_locks_lock:  # type: ignore[attr-defined]
        del streamed
        gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_memory_is_that_of_the_buffers(tmp_path):
    streamed = _streamed("adamw", tmp_path, _params())
    assert [buffer.numel() for buffer in streamed.resident_tensors] == [8192] * NUM_TRAYS
    assert streamed.disk_bytes >= 2 * 4 * 7051


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 8192), lambda path: path.write_bytes(bytes(65536))])
def test_nothing_is_trained_on_a_file_that_changed(damage, tmp_path):
    params = _params()
    streamed = _streamed("sgd", tmp_path, params)
    _set_grads(params, 0)
    streamed.step()
    damage(next(tmp_path.rglob("optimizer.state")))
    with pytest.raises(OffloadError, match="Resume from the last checkpoint"):
        streamed.step()
    with pytest.raises(OffloadError, match="failed earlier"):
        streamed.step()
    with pytest.raises(OffloadError, match="failed earlier"):
        dict(streamed.state)


def test_files_go_with_the_optimizer(tmp_path):
    streamed = _streamed("sgd", tmp_path, _params())
    assert list(tmp_path.rglob("optimizer.state"))
    streamed.close()
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import sys, torch, vissl_zero
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 1))
tier = dict(device="nvme", nvme_path=sys.argv[1])
zero = dict(level=3, offload_optimizer_config=tier, offload_param_config=tier)
model, optimizer = vissl_zero.initialize(model, dict(type="AdamW", lr=1e-3), zero)
for step in range(int(sys.argv[2])):
    loss = model(torch.full((2, 300), 0.1 * (step % 7))).square().mean()
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item(), flush=True)
"""


def _start(path: Path, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(path), str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_restart_after_kill_trusts_nothing_that_is_there(tmp_path):
    (tmp_path / "killed").mkdir()
    killed = _start(tmp_path / "killed", 1_000_000)
    first = [killed.stdout.readline() for _ in range(5)]
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    left = [path.name for path in (tmp_path / "killed").iterdir()]
    assert len(left) == 2, "parameters, and optimizer state"
    losses, messages = _start(tmp_path / "killed", 5).communicate(timeout=80)
    assert losses.splitlines(keepends=True) == first, "from the start, not from what the killed run left"
    assert f"holds files of earlier runs that were killed or kept their files: {', '.join(sorted(left))}" in messages
    assert {path.name for path in (tmp_path / "killed").iterdir()} == set(left), "its own are gone"
