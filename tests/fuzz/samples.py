"""Small whole checkpoints of every format, and what damages their content."""

from __future__ import annotations

import atexit
import functools
import json
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from moe_plugin.checkpoint.formats import all as checkpoint_formats  # noqa: F401 - registers
from moe_plugin.checkpoint.formats.base import CheckpointSizes, convert, formats, open_source
from moe_plugin.checkpoint.formats.huggingface.files import write_folder
from moe_plugin.checkpoint.formats.huggingface.format import state_source
from moe_plugin.utils import checksums
from tests.checkpoint import quantized, test_tutel
from tests.fuzz.hostile import VALUES, replaced

EXPERTS, WIDTH, INNER, WORDS, HEADS = 2, 8, 12, 11, 2
BLOCK = (5, 4)  # of float8 weights
# what each is converted to; an ending tells samples of one format apart
TARGETS = {"hf": ("plain", "megatron", "megatron_native"),
           "hf-float8": ("plain", "megatron_native"), "tutel": ("plain",),
           "fairseq_branch": ("fairseq",), "megatron": ("hf", "megatron_native"),
           "megatron_native": ("megatron", "hf"), "fairseq": ("fairseq_branch",),
           "plain": ("hf",)}
TENSORS = st.sampled_from([
    torch.zeros(0), torch.zeros(3, 3), torch.ones(8, dtype=torch.int64), torch.zeros(()),
    torch.zeros(EXPERTS, WIDTH, INNER, dtype=torch.bfloat16), torch.zeros(EXPERTS, WIDTH),
    torch.zeros(1, 1).expand(10**6, 10**6), torch.zeros(2, 2).to_sparse()])
ANYTHING = st.one_of(VALUES, TENSORS)
CONFIG = {
    "model_type": "mixtral", "vocab_size": WORDS, "hidden_size": WIDTH, "hidden_act": "silu",
    "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "tie_word_embeddings": False, "sliding_window": None, "torch_dtype": "float32"}


def format_of(name: str) -> str:
    """Format of a sample."""
    return name.partition("-")[0]


@functools.cache
def sample(name: str) -> Path:
    """A folder with a whole checkpoint of `TARGETS`; made once in a process."""
    format, folder = format_of(name), Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if format == "hf":
        state, config = _mixtral(), CONFIG
        if name != format:
            state, config = _with_codes(state), {**CONFIG, "quantization_config": {
                "quant_method": "fp8", "weight_block_size": list(BLOCK)}}
        write_folder(folder, config, state_source(state, config), most=2000)
    elif format == "tutel":
        test_tutel.saved(folder, test_tutel.whole_state(), 2, "{rank}-of-{size}.pt")
    elif format == "fairseq_branch":
        _branch(folder)
    else:
        with open_source(sample("fairseq_branch" if format == "fairseq" else "hf")) as source:
            formats.get(format)().write(convert(source, format), folder, CheckpointSizes())
    return folder


def _mixtral() -> dict[str, Tensor]:
    layer, block = "model.layers.0.", "model.layers.0.block_sparse_moe."
    shapes = {"model.embed_tokens.weight": (WORDS, WIDTH), "lm_head.weight": (WORDS, WIDTH),
              "model.norm.weight": (WIDTH,), block + "gate.weight": (EXPERTS, WIDTH)}
    shapes |= {f"{layer}self_attn.{part}_proj.weight": (WIDTH, WIDTH) for part in "qkvo"}
    shapes |= {f"{layer}{part}_layernorm.weight": (WIDTH,)
               for part in ("input", "post_attention")}
    for expert in range(EXPERTS):
        shapes |= {f"{block}experts.{expert}.{part}.weight": (
            (WIDTH, INNER) if part == "w2" else (INNER, WIDTH)) for part in ("w1", "w2", "w3")}
    return _drawn(shapes)


def _with_codes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts' and the attention's weights as float8 codes with scales."""
    for name in [name for name in state if quantized.is_quantized(name)]:
        state[name], state[f"{name}_scale_inv"] = quantized.quantized(state[name],
                                                                              BLOCK)
    return state


def _drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def _branch(folder: Path) -> None:
    """One rank's files of fairseq's `moe` branch, with Adam's state."""
    layer = "decoder.layers.0."
    expert = {"fc1.weight": (INNER, WIDTH), "fc1.bias": (INNER,), "fc2.weight": (WIDTH, INNER),
              "fc2.bias": (WIDTH,)}
    files = {
        "shared": {"decoder.embed_tokens.weight": (WORDS, WIDTH),
                   layer + "moe_layer.gate.wg.weight": (EXPERTS, WIDTH),
                   layer + "final_layer_norm.weight": (WIDTH,)},
        "rank-0": {f"{layer}moe_layer.experts.{index}.{name}": shape
                   for index in range(EXPERTS) for name, shape in expert.items()}}
    history = [{"num_updates": 5, "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}]
    for file, shapes in files.items():
        model = _drawn(shapes)
        state = {index: {"exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape), "step": 5}
                 for index, shape in enumerate(shapes.values())}
        torch.save({
            "cfg": {"model": {"arch": "transformer_lm", "moe_freq": 1}}, "model": model,
            "optimizer_history": history, "task_state": {},
            "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 5}},
            "last_optimizer_state": {"state": state, "param_groups": [
                {"lr": 0.1, "params": list(range(len(shapes)))}]}
        }, folder / f"checkpoint_last-{file}.pt")


def damage_content(path: Path, draw: st.DrawFn) -> None:
    """Write a file again, whole and sealed where it was, with something else in it.

    Raises:
        ValueError: nothing can write that.
    """
    if path.suffix == ".json":
        _damage_json(path, draw)
    elif path.suffix == ".safetensors":
        _damage_header(path, draw)
    elif path.name == ".metadata":
        _damage_metadata(path, draw)
    elif path.suffix == ".pt":
        sealed = checksums.seal_of(path) is not None
        state = changed(torch.load(path, weights_only=False), draw)
        if sealed:
            checksums.write_sealed(path, lambda stream: torch.save(state, stream))
        else:
            torch.save(state, path)
    else:
        path.write_bytes(draw(st.binary(max_size=40)))


def changed(value: Any, draw: st.DrawFn) -> Any:
    """A copy in which one value, somewhere, is another or gone, or has another name."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value, key=str)))
        rest, what = {k: v for k, v in value.items() if k != key}, draw(st.integers(0, 4))
        if what == 0:
            return rest
        if what == 1:
            other = draw(st.one_of(st.sampled_from(sorted(value, key=str)), st.text(max_size=5),
                                   st.integers(-1, 9)))
            return {**rest, other: value[key]}
        return {**value, key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw(st.booleans()):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], changed(value[index], draw), *value[index + 1:]]
    return draw(ANYTHING)


def _damage_json(path: Path, draw: st.DrawFn) -> None:
    content, sealed = checksums.open_json(path.read_text())
    content = replaced(content, draw)
    text = json.dumps(content, default=str)
    path.write_text(checksums.seal_json(content) if sealed and isinstance(content, dict) else text)


def _damage_header(path: Path, draw: st.DrawFn) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = replaced(json.loads(content[8:8 + length]), draw)
    text = json.dumps(header, default=str).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length:])


def _damage_metadata(path: Path, draw: st.DrawFn) -> None:
    """Of `torch.distributed.checkpoint`: one attribute of one record is another."""
    metadata = pickle.loads(path.read_bytes())
    tensors, places = metadata.state_dict_metadata, metadata.storage_data
    name = draw(st.sampled_from(sorted(tensors)))
    chunks = vars(tensors[name]).get("chunks") or []
    place = draw(st.sampled_from(sorted(places, key=str)))
    records: list[Any] = [metadata, tensors[name], *chunks, places[place], place]
    record = draw(st.sampled_from(records))
    field = draw(st.sampled_from(sorted(vars(record)) or ["size"]))
    value = draw(st.one_of(VALUES, st.sampled_from([
        torch.Size([3]), torch.Size([10**9, 10**9]), torch.Size([]), torch.Size([0, 0, 0]), -1,
        torch.float64, [], {}])))
    object.__setattr__(record, field, value)
    path.write_bytes(pickle.dumps(metadata))
