"""One file of settings, unchanged, in every host: `--moe-config FILE` (fairseq, Megatron),
`model.moe_config=FILE` (fairseq's Hydra command), `from_yaml(FILE)`. Layers have the file's
numbers, training is finite, and from the same weights all hosts' layers give the same output.
"""

from __future__ import annotations

import importlib.util
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from moe_plugin import MoELayer
from moe_plugin.config import flatten, from_yaml, to_dict

CONFIGS = Path(__file__).parents[2] / "configs" / "moe"
FILES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
WIDTH = 32
MEGATRON = [
    "--num-layers", "2", "--num-attention-heads", "4", "--seq-length", "16",
    "--micro-batch-size", "2", "--global-batch-size", "2", "--lr", "3e-3", "--log-interval", "1",
    "--lr-decay-iters", "8", "--train-iters", "3", "--mock-data"]
FAIRSEQ = (
    "--task language_modeling --arch moe_lm_tiny --criterion moe_cross_entropy "
    "--user-dir moe_plugin --optimizer sgd --lr 0.1 --lr-scheduler fixed "
    "--tokens-per-sample 16 --batch-size 4 --log-format json --log-interval 1 --no-progress-bar "
    "--cpu --num-workers 0 --seed 3 --max-update 3 --no-save --disable-validation")


def inputs() -> torch.Tensor:
    """[3, 40, WIDTH]."""
    return torch.randn(3, 40, WIDTH, generator=torch.Generator().manual_seed(1))


def plain(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Weights of a layer of the file, and its output in evaluation."""
    torch.manual_seed(0)
    layer = MoELayer(from_yaml(str(CONFIGS / f"{name}.yaml"), model_dim=WIDTH))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.2)
        weights = {key: value.clone() for key, value in layer.named_parameters()}
        return weights, layer.eval()(inputs()).output


def load(moe: MoELayer, weights: dict[str, torch.Tensor]) -> None:
    """Give a layer that has trained these weights, and its balancing biases their first values."""
    for name, parameter in moe.named_parameters():
        parameter.copy_(weights[name])
    for buffer in moe.router.buffers():
        buffer.zero_()


def said(name: str) -> dict[str, Any]:
    """The settings that a file names, by dotted path."""
    return flatten(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))


def check(name: str, settings: dict[str, Any], losses: list[float], output: torch.Tensor,
          own_shared_expert: bool = False) -> None:
    expected = {path: value for path, value in said(name).items()
                if not (own_shared_expert and path.startswith("experts.shared"))}
    if expected.get("parallel") == "auto":
        expected["parallel.mode"] = expected.pop("parallel")
    # what the file leaves out of routing, losses and dispatch is the tree's
    defaults = flatten(to_dict(from_yaml(str(CONFIGS / f"{name}.yaml"), model_dim=WIDTH)))
    expected |= {path: value for path, value in defaults.items() if path.startswith(
        ("losses", "dispatch.", "router.second", "router.bias", "router.noise"))}
    assert {path: settings[path] for path in expected} == expected
    assert len(losses) == 3 and all(math.isfinite(loss) for loss in losses)
    torch.testing.assert_close(output, plain(name)[1], rtol=1e-6, atol=1e-6)


def in_megatron(argv: list[str], weights: dict[str, torch.Tensor]) -> Any:
    """Train; then the layer's settings, losses, and its output with these weights."""
    from tests.hosts.megatron.training import ran

    run = ran(argv)
    layer = run.moe_layers()[0].eval()
    with torch.no_grad():
        load(layer.moe, weights)
        if layer.shared_experts is not None:
            gate, up = (weights[f"shared_expert.fc_{part}.weight"] for part in ("gate", "in"))
            layer.shared_experts.linear_fc1.weight.copy_(torch.cat([gate, up]))
            layer.shared_experts.linear_fc2.weight.copy_(weights["shared_expert.fc_out.weight"])
        # tokens in the same order, by which some find no slot
        output = layer(inputs().reshape(-1, 1, WIDTH))[0].reshape(inputs().shape)
    return (flatten(to_dict(layer.moe.config)), [r["lm_loss"] for r in run.steps_logged], output,
            layer.config.num_moe_experts)


def in_fairseq(tool: str, arguments: str, weights: dict[str, torch.Tensor]) -> Any:
    """The same by a command of fairseq, of which the log has the losses."""
    from unittest import mock

    from moe_plugin.hosts.fairseq.layers import FairseqMoELayer
    from tests.hosts.fairseq.commands import run_command

    made, init = list[Any](), FairseqMoELayer.__init__

    def seen(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    with mock.patch.object(FairseqMoELayer, "__init__", seen):
        run_command(tool, shlex.split(arguments))
    layer = made[0].eval()
    with torch.no_grad():
        load(layer.moe, weights)
        output, _ = layer(inputs().transpose(0, 1), None)
    return flatten(to_dict(layer.moe.config)), output.transpose(0, 1)


def fairseq_run(tool: str, arguments: str, name: str) -> tuple[dict[str, Any], list[float], Any]:
    from tests.hosts.fairseq.conftest import Result, environment, server

    done = server.run(1, in_fairseq, tool, arguments, plain(name)[0], environment=environment(),
                      cwd=Path(__file__).parents[2])
    losses = Result(done.code, done.log).ok().losses
    settings, output = done.results[0]
    return settings, losses, output


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.hosts.fairseq.conftest import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus")).lm


with_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec(
        "megatron.training") is None, reason="needs megatron.training (docs/megatron.md)")
with_fairseq = pytest.mark.skipif(importlib.util.find_spec("fairseq") is None,
                                  reason="needs fairseq (docs/fairseq.md)")


@pytest.mark.fast
@pytest.mark.parametrize("name", FILES)
def test_plain_layers_train(name: str) -> None:
    layer = MoELayer(from_yaml(str(CONFIGS / f"{name}.yaml"), model_dim=WIDTH))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = layer(inputs()).output.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    check(name, flatten(to_dict(layer.config)), losses, plain(name)[1])


@with_megatron
@pytest.mark.megatron
@pytest.mark.parametrize("name", FILES)
def test_the_file_in_megatron(name: str) -> None:
    from tests.hosts.megatron.ranks import on_ranks

    [(settings, losses, output, experts)] = on_ranks(1, in_megatron, [
        *MEGATRON, "--hidden-size", str(WIDTH), "--moe-config", str(CONFIGS / f"{name}.yaml")],
        plain(name)[0])
    assert experts == said(name)["num_experts"]
    check(name, settings, losses, output, own_shared_expert=True)


@with_fairseq
@pytest.mark.fairseq
@pytest.mark.parametrize("name", FILES)
def test_the_file_in_fairseq(name: str, text: Path) -> None:
    check(name, *fairseq_run("fairseq-train", f"{text} {FAIRSEQ} --decoder-embed-dim {WIDTH} "
                             f"--moe-config {shlex.quote(f'{CONFIGS / name}.yaml')}", name))


def hydra_words(way: str, name: str, home: Path) -> str:
    """A command of fairseq's Hydra that uses a file, in one of the ways of docs/one_file.md."""
    shipped, file = CONFIGS.parent / "fairseq", CONFIGS / f"{name}.yaml"
    if way == "in the YAML":
        settings = yaml.safe_load((shipped / "moe_lm_tiny.yaml").read_text())
        del settings["defaults"]
        settings["model"]["moe_config"] = str(file)
        if "experts.activation" in said(name):
            del settings["model"]["activation_fn"]
        (home / "mine.yaml").write_text("# @package _global_\n" + yaml.safe_dump(settings))
        return f"--config-dir {home} --config-name mine hydra.run.dir={home / 'hydra'}"
    words = ["--config-dir", str(shipped), "--config-name", "moe_lm_tiny",
             f"hydra.run.dir={home / 'hydra'}",
             f"moe={name}" if way == "group" else f"+model.moe_config={file}"]
    return shlex.join(words)  # the checkout's folder may contain a space


def layers_of_hydra(arguments: str) -> dict[str, Any]:
    """The settings of the layers for which a Hydra command of fairseq would start a run."""
    from unittest import mock

    from fairseq import distributed_utils

    from moe_plugin.hosts.fairseq.translate import layer_config
    from tests.hosts.fairseq.commands import run_command

    seen = list[Any]()
    with mock.patch.object(distributed_utils, "call_main", lambda cfg, *_, **__: seen.append(cfg)):
        run_command("fairseq-hydra-train", shlex.split(f"{arguments} task.data=none"))
    model = seen[0].model
    return flatten(to_dict(layer_config(
        model, model_dim=model.decoder_embed_dim, ffn_dim=model.decoder_ffn_embed_dim,
        activation=model.activation_fn)))


def hydra_layers(arguments: str) -> dict[str, Any]:
    """The same in a forked process."""
    from tests.hosts.fairseq.conftest import Result, environment, server

    done = server.run(1, layers_of_hydra, arguments, environment=environment())
    Result(done.code, done.log).ok()
    return done.results[0]


def refused_by_hydra(arguments: str, error: str) -> None:
    from tests.hosts.fairseq.conftest import fork

    done = fork(1, layers_of_hydra, arguments)
    assert done.code and re.search(error, done.log), done.log


@with_fairseq
@pytest.mark.fairseq
@pytest.mark.parametrize("way", ["in the YAML", "over the shipped YAML", "group"])
@pytest.mark.parametrize("name", FILES)
def test_fairseqs_hydra_command_builds_the_layers_of_the_file(name: str, way: str,
                                                              tmp_path: Path) -> None:
    layers = hydra_layers(hydra_words(way, name, tmp_path))
    plain_config = from_yaml(str(CONFIGS / f"{name}.yaml"), model_dim=64)
    plain_config.experts.hidden_dim = plain_config.hidden_dim
    assert layers == flatten(to_dict(plain_config))


@with_fairseq
@pytest.mark.fairseq
@pytest.mark.parametrize(("name", "way"), [("switch", "group"), ("st_moe", "in the YAML")])
def test_fairseqs_hydra_command_trains_the_file(name: str, way: str, text: Path,
                                                tmp_path: Path) -> None:
    widths = [f"model.decoder_{part}_dim={WIDTH}" for part in ("embed", "input", "output")]
    check(name, *fairseq_run(
        "fairseq-hydra-train", f"{hydra_words(way, name, tmp_path)} task.data={text} "
        f"{' '.join(widths)} model.decoder_ffn_embed_dim={4 * WIDTH} common.cpu=true "
        "common.log_interval=1 "
        "task.tokens_per_sample=16 optimization.max_update=3 checkpoint.no_save=true "
        "dataset.disable_validation=true", name))


@with_fairseq
@pytest.mark.fairseq
def test_sources_of_fairseqs_hydra_command_that_contradict(tmp_path: Path) -> None:
    """The command line overrides the YAML; what is explicit twice must agree."""
    file = shlex.quote(f"+model.moe_config={CONFIGS / 'switch.yaml'}")
    (tmp_path / "part.yaml").write_text("router: {top_k: 1}\nparallel: auto\n")
    part = shlex.quote(f"+model.moe_config={tmp_path / 'part.yaml'}")

    def words(overrides: str) -> str:
        return f"{hydra_words('group', 'dropless', tmp_path).split(' moe=')[0]} {overrides}"

    for overrides, error in (
            (f"{file} moe.num_experts=4", "moe.num_experts=4 contradicts num_experts=32 in .*sw"),
            (f"moe=dropless {file}", "chooses a group moe, but model.moe_config=.*names a file"),
            ("moe=switch model.activation_fn=gelu", "activation-fn gelu contradicts .*'relu'"),
            (f"{file} model.activation_fn=gelu", "activation-fn gelu contradicts .*'relu'"),
            ("moe=switch +model.moe_expert_count=8", "=8.* contradicts num_experts=32"),
            ("moe=switch +model.moe_top1_expert=true +moe.model_dim=32",
             "model_dim=32 in the group moe contradicts the width 64"),
            ("moe=dropless +model.moe_second_expert_policy=sampling", "sampling contradicts"),
            ("+moe.router.topk=1", "the group moe: unknown key 'router.topk'")):
        refused_by_hydra(words(overrides), error)
    # the file describes the layers, and single settings of the command line are added
    layers = hydra_layers(words(f"{file} moe.num_experts=32 +moe.router.scaling=2.0"))
    assert (layers["num_experts"], layers["router.scaling"], layers["dispatch.name"]) == (
        32, 2.0, "padded")
    # a file without a number of experts is added to the group
    layers = hydra_layers(words(f"{part} moe.num_experts=4"))
    paths = "num_experts", "router.top_k", "parallel.mode", "losses"
    assert [layers[path] for path in paths] == [4, 1, "auto", {"gshard": 0.01}]
    # our flags override the group, and make some of its settings ineffective
    layers = hydra_layers(words("moe=switch +model.moe_capacity_factor=none "
                                "+model.moe_expert_activation=gelu model.activation_fn=gelu"))
    assert (layers["dispatch.eval_capacity_factor"], layers["experts.activation"]) == (None, "gelu")


@with_fairseq
@pytest.mark.fairseq
def test_a_group_of_the_users_own_folder(tmp_path: Path) -> None:
    """It comes before the shipped group of the same name, and sets the width."""
    settings = yaml.safe_load((CONFIGS.parent / "fairseq" / "moe_lm_tiny.yaml").read_text())
    for stage in ("embed", "input", "output"):
        del settings["model"][f"decoder_{stage}_dim"]
    (tmp_path / "sub" / "moe").mkdir(parents=True)
    (tmp_path / "moe").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text(
        "# @package _global_\n" + yaml.safe_dump(settings))
    (tmp_path / "moe" / "switch.yaml").write_text(
        "model_dim: 32\nnum_experts: 5\nfairseq: {lr: 1}")
    layers = hydra_layers(f"--config-dir {tmp_path} --config-name sub/mine moe=switch "
                          f"common.cpu=true hydra.run.dir={tmp_path / 'hydra'}")
    assert [layers[path] for path in ("model_dim", "num_experts", "experts.activation")] == [
        32, 5, "gelu"]


WHOLE = """
model_dim: 32
num_experts: 6
router: {top_k: 1, input_jitter: 0.01}
experts: {hidden_dim: 24, activation: relu}
megatron: {num_layers: 2, num_attention_heads: 4, seq_length: 16, micro_batch_size: 2, lr: 3e-3}
fairseq: {arch: moe_lm_tiny, decoder_layers: 4, lr: [0.1], lr_scheduler: fixed, no_save: true,
  tokens_per_sample: 16, adam_betas: "(0.9, 0.98)", fp16: false}
"""


@with_megatron
@pytest.mark.megatron
def test_megatron_reads_width_and_its_own_section(tmp_path: Path) -> None:
    from tests.hosts.megatron.ranks import on_ranks

    (tmp_path / "moe.yaml").write_text(WHOLE)
    words = ["--train-iters", "1", "--global-batch-size", "2", "--mock-data", "--log-interval",
             "1", "--moe-config", str(tmp_path / "moe.yaml")]
    [(config, layers)] = on_ranks(1, _width_and_layers, words)
    assert (config["model_dim"], config["num_experts"], layers) == (32, 6, 2)
    assert (config["router.top_k"], config["router.input_jitter"]) == (1, 0.01)
    assert (config["experts.hidden_dim"], config["experts.activation"]) == (24, "relu")
    from tests.hosts.megatron.training import refusal

    for flags, error in ((["--num-experts", "4"],
                          "num_experts=6 contradicts .*, which is 4. .* remove one of the two"),
                         (["--hidden-size", "64"], "model_dim=32 contradicts .*, which is 64"),
                         (["--squared-relu"], "activation='relu' contradicts .*'squared_relu'")):
        [message] = on_ranks(1, refusal, [*words, *flags])
        assert re.search(error, message), message
    # an argument with its default value is compared, too
    (tmp_path / "moe.yaml").write_text(WHOLE.replace("router: {", "router: {score: sigmoid, "))
    [message] = on_ranks(1, refusal, [*words, "--moe-router-score-function", "softmax"])
    assert "router.score='sigmoid' contradicts" in message


def _width_and_layers(words: list[str]) -> tuple[dict[str, Any], int]:
    from tests.hosts.megatron.training import ran

    layers = ran(words).moe_layers()
    return flatten(to_dict(layers[0].moe.config)), len(layers)


@with_fairseq
@pytest.mark.fairseq
def test_fairseq_reads_width_and_its_own_section(text: Path, tmp_path: Path) -> None:
    from tests.hosts.fairseq.conftest import run

    (tmp_path / "moe.yaml").write_text(WHOLE)
    words = (f"{text} --user-dir moe_plugin --task language_modeling --optimizer adam --cpu "
             "--criterion moe_cross_entropy --batch-size 2 --max-update 1 --log-format json "
             f"--log-interval 1 --num-workers 0 --moe-config {tmp_path / 'moe.yaml'} ")
    done = run("fairseq-train", f"{words} --disable-validation").ok()
    assert len(done.losses) == 1
    for setting in ("'decoder_embed_dim': 32", "'decoder_layers': 4", "'adam_betas': '(0.9, 0.98)'"
                    ):
        assert setting in done.log, done.log
    for flags, error in (("--decoder-embed-dim 64", "model_dim=32 in"),
                         ("--moe-expert-count 4", "contradicts num_experts=6 in"),
                         ("--activation-fn gelu", "--activation-fn gelu contradicts"),
                         ("--moe-eval-capacity-token-fraction 0.25", "contradicts dispatch.eval"),
                         ("--decoder-layers x", "argument --decoder-layers: invalid int value")):
        run("fairseq-train", f"{words} {flags}").failed_with(error)
