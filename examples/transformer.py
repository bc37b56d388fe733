"""A plain torch transformer that learns this file by heart, one character at a time.

python examples/transformer.py
torchrun --nproc_per_node=2 examples/transformer.py --nvme_path /path/on/a/local/disk
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import vissl_zero

CONTEXT = 48


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--nvme_path", default=None)
args = parser.parse_args()

text = torch.tensor(list(Path(__file__).read_bytes()))
torch.manual_seed(0)
offload = {"device": "nvme", "nvme_path": args.nvme_path} if args.nvme_path else {"device": "cpu", "pin_memory": False}
zero = {"level": 3, "clip_grad": 1.0, "offload_optimizer_config": offload}
model, optimizer = vissl_zero.initialize(Transformer(256), {"type": "AdamW", "lr": 3e-3}, zero)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
torch.manual_seed(dist.get_rank())
for step in range(args.steps):
    rows = torch.stack([text[i : i + CONTEXT + 1] for i in torch.randint(len(text) - CONTEXT - 1, (16,)).tolist()])
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if dist.get_rank() == 0 and step % 10 in (0, 9):
        print(f"step {step}  loss {loss.item():.3f}  grad norm {optimizer.last_step.grad_norm.item():.2f}", flush=True)
