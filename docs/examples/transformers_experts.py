"""Compute the experts of a Hugging Face transformers model with moe-plugin.

The model learns to write Python, and the run records statistics of the experts.

    pip install ".[hf]"
    python transformers_experts.py [FOLDER] [IMPLEMENTATION]
    moe-plugin report FOLDER

IMPLEMENTATION is `moe_plugin`, or `grouped_mm` or `eager` of transformers, with the same losses.
For your own model, replace the small random model by `AutoModelForCausalLM.from_pretrained(...)`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MixtralConfig

import moe_plugin.hosts.transformers
from moe_plugin.config import ObserveConfig
from moe_plugin.observe import StatsRecorder

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/transformers_experts")
experts = sys.argv[2] if len(sys.argv) > 2 else "moe_plugin"
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(MixtralConfig(
    vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, output_router_logits=True,
    router_aux_loss_coef=0.01, bos_token_id=1, eos_token_id=2), experts_implementation=experts)
if experts == moe_plugin.hosts.transformers.NAME:
    print("experts are in", moe_plugin.hosts.transformers.check(model))
recorder = StatsRecorder(ObserveConfig(jsonl=str(folder / "stats.jsonl"), interval=5))
recorder.add_model(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))     # 100,000 bytes of Python
for step in range(80):
    ids = text[torch.randint(len(text) - 64, (16, 1)) + torch.arange(64)]
    loss = model(ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    recorder.training(step, loss=loss.item())
    recorder.step(step)
    if step == 0:
        first = loss.item()
recorder.close()
print(f"transformers_experts: loss {first:.2f} -> {loss.item():.2f}; moe-plugin report {folder}")
assert loss.item() < first
