"""accelerate, Hugging Face's ``Trainer`` and Lightning beside ``initialize``: the lines of docs/initialize.md."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import vissl_zero
from tests.ranks import run_on_ranks

TOLERANCE = 1e-10
LEVELS = [0, 1, 2, 3]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


class Net(nn.Module):
    """Gives a loss, as ``Trainer`` wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return {"loss": F.mse_loss(x, labels), "logits": x}


class Rows(Dataset):
    """24 pairs."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {key: torch.randn(7, generator=generator, dtype=torch.float64) for key in ("x", "labels")}


@contextmanager
def _as_torchrun_starts_it() -> Iterator[None]:
    """In float64, with the variables that these libraries read."""
    before = dict(os.environ)
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        os.environ.clear()
        os.environ.update(before)


def _trained_plainly(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        model(**batch)["loss"].backward()
        for param in model.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad, dist.ReduceOp.SUM)
            param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def _distance(state: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """On rank 0, which has the state."""
    return max([(state[name] - value).abs().max().item() for name, value in expected.items() if state], default=0.0)


def _start(level: int, **zero: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return vissl_zero.initialize(Net(), {"type": "SGD", "lr": 0.1}, {"level": level, **zero})


# --- accelerate ------------------------------------------------------------------------------------------------------


def _accelerate(level: int) -> tuple[float, str]:
    from accelerate import Accelerator

    with _as_torchrun_starts_it():
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(Rows(), batch_size=4))
        model, optimizer = _start(level)
        for batch in loader:
            optimizer.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.full_state()
        assert len(list(loader)) == 6 // dist.get_world_size()
        distance = _distance(state, _trained_plainly(list(loader)))
        try:
            accelerator.prepare(model)
        except vissl_zero.errors.VisslZeroError as error:
            return distance, str(error)
        return distance, ""


@pytest.mark.parametrize("level", LEVELS)
def test_accelerate_prepares_the_loader_and_refuses_the_model(level: int) -> None:
    for distance, refusal in run_on_ranks(2, _accelerate, level, timeout_s=120):
        assert distance < TOLERANCE and "leave it out of accelerator.prepare" in refusal


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def _trainer(level: int | None, folder: str) -> dict[str, Tensor]:
    """Trained by ``Trainer``: plain and in ``DistributedDataParallel`` where no level is given."""
    from transformers import Trainer, TrainingArguments

    class ShardedTrainer(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.prepare_model = lambda model, **options: model

        def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
            pass

        def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
            pass

    torch.manual_seed(0)
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        max_grad_norm=0.05 if level is None else 0,
        lr_scheduler_type="linear",
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        logging_strategy="no",
    )
    model: nn.Module = Net()
    if level is None:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    else:
        model, optimizer = _start(level, clip_grad=0.05)
        trainer = ShardedTrainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    trainer.train()
    if level is None:
        return {name: param.detach() for name, param in model.named_parameters()}
    return optimizer.full_state()


def _trainers() -> list[float]:
    with _as_torchrun_starts_it(), tempfile.TemporaryDirectory() as folder:
        expected = _trainer(None, folder)
        return [_distance(_trainer(level, folder), expected) for level in LEVELS]


def test_trainer_trains_what_it_trains_with_data_parallel() -> None:
    for distances in run_on_ranks(2, _trainers, timeout_s=180):
        assert max(distances) < 1e-7, distances  # clipping adds 1e-6 to the norm in one of them


def _wrapped_by_trainer() -> str:
    from transformers import Trainer, TrainingArguments

    with _as_torchrun_starts_it(), tempfile.TemporaryDirectory() as folder:
        model, optimizer = _start(2)
        arguments = TrainingArguments(folder, use_cpu=True, report_to="none", remove_unused_columns=False)
        try:
            Trainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, None)).train()
        except vissl_zero.errors.VisslZeroError as error:
            return str(error)
        return ""


def test_trainer_as_it_is_is_refused() -> None:
    for refusal in run_on_ranks(2, _wrapped_by_trainer, timeout_s=120):
        assert "would do it a second time" in refusal


def _save_pretrained(level: int, folder: str) -> tuple[float, str]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(
        BertConfig(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    )
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = vissl_zero.initialize(model, {"type": "SGD", "lr": 0.1}, {"level": level})
    state = optimizer.full_state()
    said = ""
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
        try:
            model.save_pretrained(f"{folder}/direct")
        except vissl_zero.errors.VisslZeroError as error:
            said = str(error)
    dist.barrier()
    folders = [folder] if level == 3 else [folder, f"{folder}/direct"]
    found = [BertModel.from_pretrained(place).state_dict() for place in folders]
    return max(_distance(one, expected) for one in found), said


@pytest.mark.parametrize("level", LEVELS)
def test_save_pretrained_of_full_state(level: int, tmp_path: Path) -> None:
    """Without it, a model in parts says what to write."""
    (distance, said), (other, _) = run_on_ranks(2, _save_pretrained, level, str(tmp_path), timeout_s=120)
    assert distance == other == 0
    assert ("optimizer.full_state()" in said) == (level == 3)


# --- Lightning -------------------------------------------------------------------------------------------------------


def _lightning(level: int, folder: str) -> tuple[float, str]:
    import pytorch_lightning as lightning
    from pytorch_lightning.strategies import SingleDeviceStrategy

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net, self.sharded = _start(level)

        def training_step(self, batch: Any, index: int) -> None:
            self.sharded.backward(self.net(**batch)["loss"])
            self.sharded.step()
            self.sharded.zero_grad()

        def forward(self, **batch: Tensor) -> Any:
            return self.net(**batch)

        def configure_optimizers(self) -> None:
            return None

    def fit(strategy: Any) -> Lit:
        module = Lit()
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        quiet = {"enable_model_summary": False, "default_root_dir": folder, "use_distributed_sampler": False}
        trainer = lightning.Trainer(strategy=strategy, max_epochs=2, accelerator="cpu", devices=1, **options, **quiet)
        trainer.fit(module, loader)
        return module

    with _as_torchrun_starts_it():
        rows: Any = torch.utils.data.distributed.DistributedSampler(Rows(), shuffle=False)
        loader = DataLoader(Rows(), batch_size=4, sampler=rows)
        state = fit(SingleDeviceStrategy("cpu")).sharded.full_state()
        distance = _distance(state, _trained_plainly([*loader, *loader]))
        try:
            nn.parallel.DistributedDataParallel(Lit())(**next(iter(loader)))  # as Lightning's own strategy does
        except vissl_zero.errors.VisslZeroError as error:
            return distance, str(error)
        return distance, ""


@pytest.mark.parametrize("level", LEVELS)
def test_lightning_trains_on_a_single_device_of_each_rank(level: int, tmp_path: Path) -> None:
    for distance, refusal in run_on_ranks(2, _lightning, level, str(tmp_path), timeout_s=120):
        assert distance < TOLERANCE and "would do it a second time" in refusal
