r"""Train a GPT model with MoE layers in Megatron's training loop, `megatron.training.pretrain`.

You can copy and extend this example. The script needs megatron-core 0.17 or newer, or a Megatron-LM
checkout on PYTHONPATH. The script does not import anything from moe_plugin. `--spec` selects the
layers, and defaults to this package's layers. The launcher adds all other flags of this package.

    torchrun --nproc_per_node 8 -m moe_plugin.hosts.megatron.launch pretrain_gpt_moe \
        --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 \
        --micro-batch-size 4 --train-iters 10000 --lr 5e-4 --bf16 --num-experts 64 \
        --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 \
        --expert-model-parallel-size 8 --disable-bias-linear --data-path data/corpus \
        --eval-interval 1000 --save runs/first --load runs/first --save-interval 1000

Without a GPU, the script trains on the CPU. Use `--mock-data` instead of `--data-path` to train on
generated tokens. `python -m moe_plugin.hosts.megatron.data` converts a text file to a dataset with
257 tokens: the 256 byte values and an end-of-document token. If the data were encoded with a
different tokenizer, pass the `--tokenizer-type` of this tokenizer, or only its `--vocab-size`.
"""

import inspect
import math
from functools import partial

import torch
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from megatron.core.transformer.spec_utils import import_module
from megatron.training import arguments, get_args, get_tokenizer, pretrain
from megatron.training.utils import get_blend_and_blend_per_split

# `--vocab-size` of byte data, in which documents end with token 256: up to megatron-core 0.17 the
# tokenizer itself adds the end-of-document token to the vocabulary
BYTES = 257 if NullTokenizer(257).eod == 256 else 256


def own_defaults(parser):
    """Change the default values of some of Megatron's arguments. Some of the new defaults depend on
    the arguments that the user passed.

    With these defaults, a checkpoint can be resumed with different parallel sizes and a different
    `--train-iters`. A non-finite loss does not end the run, because the launcher skips the step.
    """
    parser.set_defaults(tokenizer_type="NullTokenizer", log_interval=10, eval_interval=None,
                        eval_iters=None, make_vocab_size_divisible_by=None,
                        spec=["moe_plugin.hosts.megatron.spec", "moe_layer"],
                        override_opt_param_scheduler=True, dist_ckpt_optim_fully_reshardable=True,
                        check_for_nan_in_loss_and_grad=False, moe_token_dispatcher_type="alltoall")
    parse = parser.parse_known_args

    def parse_known_args(*given, **named):
        args, unknown = parse(*given, **named)
        asked = [name for name in ("skip_train", "eval_interval") if getattr(args, name)]
        following = what_follows(args)
        parser.set_defaults(**following)
        for name, value in following.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        refuse_nothing_to_evaluate(args, asked)
        return args, unknown

    parser.parse_known_args = parse_known_args
    return parser


def what_follows(args):
    """Return the default values that depend on the arguments that the user passed.

    With these defaults, evaluation runs only if the user requests it, a checkpoint is written at
    the end of the run, and sizes are derived from the data.
    """
    evaluates, tensor = args.eval_interval or args.skip_train, args.tensor_model_parallel_size
    return {"eval_interval": 1000, "eval_iters": 10 if evaluates else 0,
            "save_interval": args.train_iters or 10**9,
            "max_position_embeddings": args.seq_length,
            # Megatron multiplies this number by the tensor-parallel size; the padded vocabulary
            # is therefore the same for any usual tensor-parallel size
            "make_vocab_size_divisible_by": math.lcm(128, tensor) // tensor,
            "vocab_size": BYTES if args.tokenizer_type == "NullTokenizer" else None}


def refuse_nothing_to_evaluate(args, asked):
    """Raise a `ValueError` if the user requested an evaluation that Megatron would silently skip.

    asked: names of the arguments that request the evaluation.
    """
    for name in asked[:1]:
        flag, value = "--" + name.replace("_", "-"), getattr(args, name)
        if args.eval_iters < 1 and not getattr(args, "full_validation", False):
            raise ValueError(f"eval_iters={args.eval_iters} is out of bounds: it must be >= 1 with "
                             f"{flag}. Use a positive number, or train without {flag}.")
        _, valid, test = parse_and_normalize_split(args.split) if args.split else (0, 1, 1)
        if not (valid or (test and name == "skip_train")):
            raise ValueError(f"{name}={value} has nothing to evaluate with split={args.split!r}. "
                             "The second part of the split must be > 0. Use --split 0,1,0, or "
                             f"train without {flag}.")


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None,
                   pg_collection=None):
    """Build the layers of the current pipeline stage from the spec that `--spec` selects."""
    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    layers = import_module(args.spec)
    common = {
        "vocab_size": args.padded_vocab_size, "max_sequence_length": args.max_position_embeddings,
        "pre_process": pre_process, "post_process": post_process, "parallel_output": True,
        "fp16_lm_cross_entropy": args.fp16_lm_cross_entropy,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent, "rotary_base": args.rotary_base,
        "vp_stage": vp_stage, "pg_collection": pg_collection}
    if getattr(args, "hybrid_layer_pattern", None):
        from megatron.core.models.hybrid.hybrid_model import HybridModel  # from 0.18 on

        return HybridModel(config, layers, hybrid_layer_pattern=args.hybrid_layer_pattern, **common)
    prediction = None
    if args.mtp_num_layers:
        prediction = get_gpt_mtp_block_spec(
            config, layers, use_transformer_engine=args.transformer_impl == "transformer_engine",
            vp_stage=vp_stage)
    return GPTModel(config, layers, mtp_block_spec=prediction, **common)


def datasets(samples, vp_stage=None):
    """Return the training, validation and test datasets. `samples` contains the number of sequences
    for each dataset.

    Every rank reads the datasets, so that the tokens of a batch are available on all pipeline
    stages. Routers such as `hash` also need the tokens on the middle stages.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    documents = getattr(args, "dataloader_inter_document_masking", False)
    if documents and (args.context_parallel_size > 1 or (
            args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1)):
        raise ValueError("With --dataloader-inter-document-masking, this example cannot split "
                         "documents among ranks, and sends one sequence at a time between stages. "
                         "Use --context-parallel-size 1. With pipeline stages, also use "
                         "--micro-batch-size 1.")
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, blend=blend,
        blend_per_split=blend_per_split, split=args.split, tokenizer=get_tokenizer(),
        path_to_cache=args.data_cache_path, reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask, eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        **({"inter_document_masking": True} if documents else {}))
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, samples, lambda: True, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]  # read on every rank, not on the first of each tensor-parallel group


def lm_loss(loss_mask, losses):
    """Return the sum of the token losses, the number of tokens, and the statistics to log.

    The sum does not include the balance losses of MoE layers. The balance losses are not part of
    the sum because each MoE layer adds their gradients itself, through Megatron's loss scaler and
    on its own pipeline stage. The losses are weighted by `--moe-aux-loss-coeff` and `--moe-losses`.
    Each balance loss is logged with its own name.
    """
    mask = loss_mask.view(-1).float()
    total, tokens = (losses.view(-1).float() * mask).sum(), mask.sum().int()
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def part_of_sequence(name, value):
    """Return the slice of a batch tensor that belongs to the current context-parallel rank.

    With N ranks, Megatron splits each sequence into `2 * N` chunks. Rank `i` receives two chunks:
    chunk `i` counted from the start of the sequence, and chunk `i` counted from the end.
    """
    parts = get_args().context_parallel_size
    if parts == 1:
        return value
    axis, part = 2 if name == "attention_mask" else 1, mpu.get_context_parallel_rank()
    pieces = value.chunk(2 * parts, axis)
    return torch.cat([pieces[part], pieces[-1 - part]], axis)


def packed(batch):
    """Return the batch as one long sequence, together with parameters that specify where each
    document begins.

    The batch comes from a dataset with `--dataloader-inter-document-masking` (megatron-core 0.19).
    Attention is computed only within a document.
    """
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.utils import flatten_batch_for_packed_sequences

    length = batch["tokens"].shape[1]
    batch = flatten_batch_for_packed_sequences(batch)
    starts, longest = batch["cu_seqlens"][0], int(batch["max_seqlen"])
    return batch, PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest,
        max_seqlen_kv=longest, tokens_per_sample=length)


def forward_step(batches, model, return_schedule_plan=False):
    """Compute one micro-batch on the current pipeline stage. Return the output of the stage (losses
    or activations) and the loss function.

    return_schedule_plan: True if Megatron requests a plan of the computation instead of its output,
        as it does with `--overlap-moe-expert-parallel-comm`.
    """
    batch, documents = {
        name: value.cuda(non_blocking=True) for name, value in next(batches).items()
        if isinstance(value, torch.Tensor)
    }, {}
    if "cu_seqlens" in batch:
        batch, documents["packed_seq_params"] = packed(batch)
    else:
        batch = {name: part_of_sequence(name, value) for name, value in batch.items()}
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(batch["tokens"], batch["position_ids"], batch.get("attention_mask"),
                 labels=batch["labels"], loss_mask=batch["loss_mask"], **documents)
    return output, partial(lm_loss, batch["loss_mask"])


def main():
    """Parse the command-line arguments and train the model."""
    steps = {"model_provider": model_provider, "model_type": ModelType.encoder_or_decoder,
             "forward_step_func": forward_step}
    if "cfg_container" not in inspect.signature(pretrain).parameters:  # before megatron-core 0.18
        pretrain(datasets, extra_args_provider=own_defaults, **steps)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    args = arguments.parse_and_validate_args(extra_args_provider=own_defaults)
    pretrain(pretrain_cfg_container_from_args(args), datasets, **steps)


if __name__ == "__main__":
    main()
