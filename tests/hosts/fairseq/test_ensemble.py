"""An ensemble of output heads under the confident oracle loss."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from fairseq import metrics

from moe_plugin.hosts.fairseq.criterion import ConfidentOracleCriterion, MoEEnsembleLanguageModel
from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.hosts.fairseq.options import ConfidentOracleConfig, MoEEnsembleConfig
from moe_plugin.observe.history.host_logs import parse_step
from moe_plugin.training.cmcl import uniform_divergence
from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, Corpus, run
from tests.hosts.fairseq.small import dictionary, language_model, task, tokens

SMALL = {
    "decoder_embed_dim": 16, "decoder_input_dim": 16, "decoder_output_dim": 16,
    "decoder_ffn_embed_dim": 32, "decoder_layers": 2, "tpu": False, "decoder_attention_heads": 2,
    "dropout": 0.0, "max_target_positions": 32, "tokens_per_sample": 32, "moe_freq": 2,
    "moe_expert_count": 4, "add_bos_token": False, "ensemble_heads": 3,
    "share_decoder_input_output_embed": True,
}


def model() -> MoEEnsembleLanguageModel:
    torch.manual_seed(1)
    return MoEEnsembleLanguageModel.build_model(MoEEnsembleConfig(**SMALL), task())


def sample() -> dict:
    ids = tokens(pads=3)
    return {
        "net_input": {"src_tokens": ids}, "target": ids,
        "ntokens": int(ids.ne(dictionary().pad()).sum()), "nsentences": 3, "id": torch.arange(3)
    }


@pytest.mark.fast
def test_a_state_of_heads_gets_no_matrix_of_the_embedding() -> None:
    """fairseq adds the tied matrix to a state without an output matrix."""
    net = model()
    net.load_state_dict(net.state_dict())


@pytest.mark.parametrize("unit", ["sentence", "token"])
def test_the_loss_is_the_confident_oracle_loss_by_sentence_or_token(unit: str) -> None:
    net, batch = model().eval(), sample()
    criterion = ConfidentOracleCriterion.build_criterion(
        ConfidentOracleConfig(sentence_avg=False, oracle_unit=unit, moe_gate_loss_wt=0.5), task())
    loss, size, logged = criterion(net, batch)
    logits, target = net(**batch["net_input"])[0].detach().double(), batch["target"]
    gate = float(moe_layers(net)[0].gate_loss)
    want = 0.0
    for b in range(3):
        real = [t for t in range(8) if target[b, t] != dictionary().pad()]
        for unit_tokens in ([real] if unit == "sentence" else [[t] for t in real]):
            ce = [
                sum(float(F.cross_entropy(logits[b, t, m], target[b, t])) for t in unit_tokens)
                for m in range(3)
            ]
            kl = [
                sum(float(uniform_divergence(logits[b, t, m][None, None])) for t in unit_tokens)
                for m in range(3)
            ]
            want += min(ce[m] + 0.75 * (sum(kl) - kl[m]) for m in range(3))
    assert size == 18 and float(loss) == pytest.approx(want + 0.5 * gate * 18, rel=1e-5)
    right = (logits.argmax(-1) == target[..., None]) & target.ne(dictionary().pad())[..., None]
    assert int(logged["oracle_errors"]) == 18 - int(right.any(-1).sum()) and 0 < int(
        logged["top1_errors"]) <= 18


def test_confidences_of_a_validation_are_logged_and_read() -> None:
    net, batch = model(), sample()
    criterion = ConfidentOracleCriterion(task(), False)
    assert not any("confidence" in name for name in criterion(net.train(), batch)[2])
    logs = [criterion(net.eval(), batch)[2] for _ in range(2)]
    with metrics.aggregate(new_root=True) as found:
        for log in logs:
            ConfidentOracleCriterion.reduce_metrics([log])
    values = found.get_smoothed_values()
    line = {f"valid_{name}": values[name] for name in values if name.startswith("confidence")}
    [kind, record] = parse_step("2026 | INFO | valid | " + json.dumps(
        {"valid_loss": 1.0, "valid_num_updates": 4, **line}))
    logits = net(**batch["net_input"])[0].detach()[batch["target"] != dictionary().pad()]
    want = torch.bincount((10 * logits.softmax(-1).mean(1).amax(-1)).long(), minlength=10)
    assert kind == "valid" and [*record.confidence] == ["responsible", "other", "ensemble"]
    assert record.confidence["ensemble"] == tuple((2 * want).tolist())
    assert [sum(counts) for counts in record.confidence.values()] == [36, 72, 36]


def test_probabilities_are_the_mean_of_the_heads() -> None:
    net, ids = model().eval(), tokens()
    out = net(ids)
    p = net.get_normalized_probs(out, log_probs=False)
    torch.testing.assert_close(p, out[0].softmax(-1).mean(2))
    torch.testing.assert_close(net.get_normalized_probs(out, log_probs=True).exp(), p)
    again = model()
    again.load_state_dict(net.state_dict())
    torch.testing.assert_close(again.eval()(ids)[0], out[0])


def test_one_head_is_explained() -> None:
    with pytest.raises(ValueError, match="moe_ensemble_lm"):
        ConfidentOracleCriterion(task(), False)(language_model(), sample())


def test_trains_from_the_command_line(corpus: Corpus, tmp_path) -> None:
    arguments = (
        f"{corpus.lm} {LANGUAGE_MODEL} --user-dir moe_plugin --moe-freq 2 --moe-expert-count 4 "
        f"{DROPLESS} --criterion moe_confident_oracle "
        "--ensemble-heads 3 --ensemble-hidden 16 --ensemble-sharing 0.7 --oracle-labels "
        f"stochastic --max-update 12 --save-dir {tmp_path}"
    )
    result = run("fairseq-train",
                 arguments.replace("--arch transformer_lm", "--arch moe_ensemble_lm")).ok()
    losses = result.losses
    assert len(losses) == 12 and losses[-1] < losses[0] and all(
        math.isfinite(loss) for loss in losses)
    assert all(0 <= step["oracle_error"] <= 1 and 0 <= step["top1_error"] <= 1
               for step in result.steps)
