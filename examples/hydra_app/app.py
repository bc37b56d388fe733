"""A Hydra program of its own with a model of its own, sharded by one line of its defaults: ``python app.py``, or
``torchrun --nproc-per-node 2 app.py vissl_zero/zero=sdp``.
"""

import hydra
import torch
from omegaconf import DictConfig
from torch import nn

import vissl_zero


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)])
    return nn.Sequential(blocks, nn.Linear(16, 1)).double()


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(cfg: DictConfig) -> None:
    sgd = {"type": "SGD", "lr": cfg.lr, "momentum": 0.9}
    model, optimizer = vissl_zero.initialize(build(), optimizer=sgd, zero=cfg.vissl_zero.zero)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = torch.Generator().manual_seed(1)
    for _ in range(cfg.steps):
        images = torch.rand(8, 16, generator=data, dtype=torch.float64)
        mine = images[rank::world]
        loss = (model(mine) - mine.sum(dim=1, keepdim=True)).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.full_state()  # whole, on rank 0
    if state:
        total = sum(value.abs().sum() for value in state.values())
        print(f"level {cfg.vissl_zero.zero.level}, {world} processes, sum of weights {total:.12f}")


if __name__ == "__main__":
    main()
