"""Replace feed-forward modules of an ordinary PyTorch model with experts.

The model learns to write Python, and the run records statistics of the experts.

    python replace_ffn.py [FOLDER]
    moe-plugin report FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import moe_plugin
from moe_plugin.config import ObserveConfig
from moe_plugin.observe import StatsRecorder


class LanguageModel(nn.Module):
    """A language model of bytes in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.bytes, self.places = nn.Embedding(256, 64), nn.Embedding(64, 64)
        self.blocks, self.head = nn.TransformerEncoder(block, 4), nn.Linear(64, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.bytes(ids) + self.places.weight[:ids.shape[1]]
        return self.head(self.blocks(x, mask=mask, is_causal=True))


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/replace_ffn")
torch.manual_seed(0)
model = LanguageModel()
names = moe_plugin.replace_ffn(model, num_experts=8, every=2)
print("experts are in", names)
recorder = StatsRecorder(ObserveConfig(jsonl=str(folder / "stats.jsonl"), interval=5))
recorder.add_model(model)

optimizer = torch.optim.AdamW(moe_plugin.optimizer_groups(model, lr=3e-3, weight_decay=0.01))
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))     # 100,000 bytes of Python
for step in range(80):
    ids = text[torch.randint(len(text) - 65, (16, 1)) + torch.arange(65)]
    task = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss = task + moe_plugin.auxiliary_loss(model)
    optimizer.zero_grad()
    loss.backward()
    moe_plugin.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    moe_plugin.finish_step(model)
    recorder.training(step, loss=task.item())
    recorder.step(step)
    if step == 0:
        first = task.item()
recorder.close()
print(f"replace_ffn: loss {first:.2f} -> {task.item():.2f}; moe-plugin report {folder}")
assert task.item() < first
