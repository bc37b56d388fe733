"""torchvision's ResNet-18 on 1,797 scans of digits; built without weights, initialized shard by shard.

python examples/torchvision_digits.py
torchrun --nproc_per_node=2 examples/torchvision_digits.py --level 2
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits

import vissl_zero  # before torchvision, which it lets be imported beside a CPU build of torch

from torchvision.models import resnet18  # isort: skip

parser = argparse.ArgumentParser()
parser.add_argument("--level", type=int, default=3)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save", default=None, help="where rank 0 writes the full weights")
args = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None].repeat(1, 3, 1, 1) / 16
images, labels = F.interpolate(images, 16), torch.tensor(digits.target)

with torch.device("meta"):  # no memory yet: a model larger than this machine can be made so
    model = resnet18(num_classes=10)
optimizer = {"type": "AdamW", "lr": 1e-3, "weight_decay": 1e-2}
zero = {"level": args.level, "gradient_accumulation_steps": 2}
model, optimizer = vissl_zero.initialize(model, optimizer, zero, seed=1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(args.steps):
    chosen = torch.randint(1500, (32,), generator=generator)
    loss = F.cross_entropy(model(images[chosen]), labels[chosen])
    optimizer.backward(loss)  # scaled by 1/2; every second step() updates
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if dist.get_rank() == 0 and (step % 20 == 0 or step == args.steps - 1):
        print(f"step {step}  loss {loss.item():.3f}", flush=True)

model.eval()
with torch.no_grad():
    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
state = optimizer.full_state()
if dist.get_rank() == 0:
    print(f"accuracy {accuracy:.3f} on {len(images) - 1500} others")
    if args.save:
        torch.save(state, args.save)
