"""Share the experts of one layer between two ranks, with torch's FSDP2 for all other parameters.

    torchrun --standalone --nproc_per_node 2 two_ranks.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import moe_plugin

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
torch.manual_seed(0)  # all ranks start with the same dense weights

config = moe_plugin.from_yaml("configs/moe/switch.yaml", model_dim=32)  # an installed example
model = nn.Sequential(nn.Linear(16, 32), moe_plugin.MoEBlock(config), nn.Linear(32, 16)).to(device)
model = moe_plugin.fully_shard_model(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

x = torch.randn(64, 16, device=device) + dist.get_rank()  # each rank has different data
for step in range(10):
    task = (model(x) - x).square().mean()
    optimizer.zero_grad()
    (task + moe_plugin.auxiliary_loss(model)).backward()
    norm = moe_plugin.clip_grad_norm_(model.parameters(), 1.0)  # the same on both ranks
    optimizer.step()
    moe_plugin.finish_step(model)
    if step == 0:
        first = task.item()
assert task.item() < first
print(f"two_ranks: rank {dist.get_rank()}: loss {first:.2f} -> {task.item():.2f}, "
      f"norm {norm.item():.3f}", flush=True)
dist.destroy_process_group()
