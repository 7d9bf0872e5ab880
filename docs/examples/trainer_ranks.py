"""Train a Mixtral on several ranks with the `Trainer` of transformers.

The script trains, evaluates and saves. When it is started again, it continues from the last
checkpoint, which may come from another number of ranks.

    pip install ".[hf]"
    torchrun --standalone --nproc_per_node 2 trainer_ranks.py --folder runs/trainer --steps 10
    torchrun --standalone --nproc_per_node 2 trainer_ranks.py --folder runs/trainer --steps 20

For your own model, pass its folder to `from_pretrained` instead of the small random model.
"""

import argparse
import os

import torch
from torch import distributed
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.trainer_utils import get_last_checkpoint

import moe_plugin.hosts.transformers  # registers the name, and lets Trainer save and resume


def main(words: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=20, help="with those of earlier runs")
    options = parser.parse_args(words)
    args = TrainingArguments(
        options.folder, max_steps=options.steps, per_device_train_batch_size=4, save_steps=10,
        learning_rate=1e-2, lr_scheduler_type="constant", report_to="none",
        use_cpu=not torch.cuda.is_available())
    start, ranks = f"{options.folder}/start", args.world_size
    os.makedirs(options.folder, exist_ok=True)
    last = get_last_checkpoint(options.folder)
    with args.main_process_first():
        if last is None and args.process_index == 0:
            torch.manual_seed(0)
            MixtralForCausalLM(MixtralConfig(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
                output_router_logits=True, router_aux_loss_coef=0.01)).save_pretrained(start)
    model = AutoModelForCausalLM.from_pretrained(
        start, experts_implementation="moe_plugin", distributed_config=DistributedConfig(
            fsdp_size=ranks, ep_size=ranks, ep_implementation="moe_plugin"))
    moe_plugin.hosts.transformers.check(model)
    counting = [(7 * n + (1 + n % 5) * torch.arange(16)) % 64 for n in range(400)]
    rows = [{"input_ids": ids, "labels": ids} for ids in counting]
    trainer = Trainer(model, args, train_dataset=rows[:320], eval_dataset=rows[320:])
    trainer.train(resume_from_checkpoint=last)
    loss: float = trainer.evaluate()["eval_loss"]
    if args.process_index == 0:
        print(f"trainer_ranks: {options.steps} steps, loss {loss:.6f}", flush=True)
    return loss


if __name__ == "__main__":
    main()
    if distributed.is_initialized():
        distributed.destroy_process_group()
