"""Imported once by the server that forks fairseq's ranks (tests/preloaded.py)."""

import argparse
import importlib
import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"

for tool in ("eval_lm", "generate", "hydra_train", "preprocess", "train", "validate"):
    importlib.import_module(f"fairseq_cli.{tool}")
importlib.import_module("torch._dynamo")  # 2 s; the first optimizer imports it
utils = importlib.import_module("fairseq.utils")
utils.import_user_module(argparse.Namespace(user_dir="moe_plugin"))
