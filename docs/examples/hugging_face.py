"""Use our layer in a Mixture-of-Experts model of Hugging Face's transformers.

The output is the same, and transformers can read the saved checkpoint.

    pip install ".[hf]"
    python hugging_face.py

For your own model, replace the small random model by
`AutoModelForCausalLM.from_pretrained(...)`.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from moe_plugin import auxiliary_loss
from moe_plugin.hosts.plain.huggingface import restore_moe_blocks, swap_moe_blocks

torch.manual_seed(0)
model = MixtralForCausalLM(MixtralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, bos_token_id=1,
    eos_token_id=2, pad_token_id=None)).eval()
ids = torch.randint(64, (2, 12))
with torch.no_grad():
    before = model(ids).logits

swap_moe_blocks(model, settings={"losses": {"switch": 0.01}})
with torch.no_grad():
    difference = (model(ids).logits - before).abs().max().item()
assert difference < 1e-4

model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    task = model(ids, labels=ids).loss
    optimizer.zero_grad()
    (task + auxiliary_loss(model)).backward()
    optimizer.step()

restore_moe_blocks(model.eval())
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    model.save_pretrained(folder)
    again = MixtralForCausalLM.from_pretrained(folder).eval()
    assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-5)
print(f"hugging_face: largest difference of logits {difference:.1e}, loss {task.item():.2f}")
