"""Does sharding change what this loop trains?

torchrun --nproc-per-node 2 examples/verify_loop.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import vissl_zero


def build():
    """A model and its optimizer, as for plain torch."""
    model = nn.Sequential(nn.Linear(12, 33), nn.GELU(), nn.Linear(33, 5))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, batch):
    """The body of the loop."""
    inputs, labels = batch
    loss = F.cross_entropy(model(inputs), labels)
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


if __name__ == "__main__":
    torch.manual_seed(0)  # every rank gives the same complete batches
    batches = [(torch.randn(8, 12), torch.randint(5, (8,))) for _ in range(4)]
    verdict = vissl_zero.verify(build, step, batches, zero={"level": 3, "clip_grad": 1.0})
    if torch.distributed.get_rank() == 0:
        print(verdict)
