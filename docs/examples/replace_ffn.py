"""Experts in place of the feed-forward parts of an ordinary PyTorch model.

    python replace_ffn.py
"""

from __future__ import annotations

import torch
from torch import nn

import moe_plugin

torch.manual_seed(0)
block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(block, 4), nn.Linear(32, 50))

names = moe_plugin.replace_ffn(model, num_experts=8, every=2)
print("experts are in", names)

optimizer = torch.optim.AdamW(moe_plugin.optimizer_groups(model, lr=3e-3, weight_decay=0.01))
ids = torch.randint(50, (8, 16))                # the task: say what stands there
for step in range(20):
    task = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss = task + moe_plugin.auxiliary_loss(model)
    optimizer.zero_grad()
    loss.backward()
    moe_plugin.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    moe_plugin.finish_step(model)
    if step == 0:
        first = task.item()
print(f"replace_ffn: loss {first:.2f} -> {task.item():.2f}")
assert task.item() < first
