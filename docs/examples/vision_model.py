"""Train SwinV2 with experts (`moe_plugin.hosts.timm`) on generated images. For image folders see
docs/vision.md.

    pip install ".[vision]"     # docs/vision.md says how to keep the torch that you have
    python vision_model.py
"""

from __future__ import annotations

import torch

import moe_plugin
from moe_plugin.hosts.timm.model import PRESETS, build

torch.manual_seed(0)
model = build(PRESETS["tiny"], classes=2)
labels = torch.arange(32) % 2
images = torch.randn(32, 3, 16, 16) + labels.view(-1, 1, 1, 1)      # bright or dark
optimizer = torch.optim.AdamW(moe_plugin.optimizer_groups(model, lr=1e-3, weight_decay=0.05))

for step in range(5):
    task = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    (task + moe_plugin.auxiliary_loss(model)).backward()
    optimizer.step()
    moe_plugin.finish_step(model)
    if step == 0:
        first = task.item()
print(f"vision_model: loss {first:.2f} -> {task.item():.2f}")
assert task.item() < first
