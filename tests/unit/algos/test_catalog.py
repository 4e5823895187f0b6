"""The registries of algorithms: what a plugin file adds to them, and what is said of one that is wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from posttrain.algos import ADVANTAGES, POLICY_LOSSES
from posttrain.algos.episodes import Episodes
from posttrain.algos.losses import weighted_policy_loss
from posttrain.algos.tokens import TokenInputs, UpdateTokens
from posttrain.config import Config
from posttrain.config.presets import resolve
from posttrain.config.writing import dump_toml
from posttrain.core.errors import CodeError, ConfigError
from posttrain.plan.command import stored_config

REPO = Path(__file__).resolve().parents[3]
EXAMPLES = ("my_loss.py", "my_advantage.py")

PLUGIN = """
import torch

from posttrain.algos import advantage_estimator, policy_loss

@policy_loss("raises")
def raises(logprobs, tokens):
    return logprobs.no_such_method(), {}

@policy_loss("mean")
def mean(logprobs, tokens, *, clip_low: float, scale: float, on: bool = True, note: str = "", count: int = 1):
    return logprobs.mean(), {}

@policy_loss("metric")
def metric(logprobs, tokens):
    return logprobs, {"entropy": torch.zeros(3)}

@policy_loss("keys")
def keys(logprobs, tokens, *, gamma: float, kl_coef: float):
    return logprobs, {}

@policy_loss("column", prepare=lambda update: update.advantages[:1])
def column(logprobs, tokens):
    return logprobs, {}

@advantage_estimator("returns_none")
def returns_none(episodes):
    return None

@advantage_estimator("raises")
def raising(episodes):
    raise KeyError("gone")
"""


@pytest.fixture
def plugin(registries, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    return file


def resolved(*sets: str, plugin: Path | str, **flags: str) -> Config:
    return resolve("rl", "tiny-arith", sets, {"plugins": [str(plugin)], **flags}).config


def test_importing_the_algorithms_and_resolving_a_config_loads_no_torch() -> None:
    code = (
        "import sys\nfrom posttrain.config.presets import resolve\nfrom posttrain.algos import BUNDLES\n"
        "resolve('rl', 'tiny-arith', [], {'algo.name': 'gspo'})\n"
        "print(len(BUNDLES.names()), [name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.stdout == "19 []\n", done.stderr


# ---------------------------------------------------------------------- the examples


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short_and_stand_in_the_guide(name: str) -> None:
    text = (REPO / "examples" / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    guide = (REPO / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert f"```python\n{text}```" in guide


def test_example_loss_by_hand(registries) -> None:
    config = resolved("algo.loss_kwargs.beta=0.5", plugin=REPO / "examples" / "my_loss.py", **{"algo.name": "dro"})
    assert (config.algo.advantage, config.algo.policy_loss, config.algo.loss_agg) == ("rloo", "dro", "token-mean")
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    tokens = TokenInputs(torch.tensor([1.0, -3.0]), torch.tensor([-1.2, -2.0]))
    loss, sums = weighted_policy_loss(
        POLICY_LOSSES.get("dro"), logprobs, tokens, config.algo.loss_values, torch.tensor([0.5, 0.25])
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.5 * (1.0 + 0.25 * 0.2**2) + 0.25 * -6.0)
    assert logprobs.grad.tolist() == pytest.approx([0.5 * (-1.0 + 0.5 * 0.2), 0.25 * 3.0])
    assert float(sums["actor/squared_log_ratio"]) == pytest.approx(0.5 * 0.2**2)


def test_example_estimator_by_hand(registries) -> None:
    plugin = REPO / "examples" / "my_advantage.py"
    config = resolved("algo.advantage=win_rate", "algo.advantage_kwargs.margin=0.15", plugin=plugin)
    every = torch.ones(6, dtype=torch.bool)
    rewards, prompts = torch.tensor([1.0, 0.9, 0.5, 3.0, 0.0, 2.0]), torch.tensor([7, 7, 7, 7, 9, 4])
    episodes = Episodes(rewards, prompts, every, torch.arange(6))
    result = ADVANTAGES.get("win_rate")(episodes, config.algo.advantage_values)
    # Of four: 1.0 draws with 0.9, beats 0.5, and loses to 3.0. Groups of one have nothing to beat.
    torch.testing.assert_close(result.advantages, torch.tensor([0.0, 0.0, -1.0, 1.0, 0.0, 0.0]))


def test_plugin_needs_are_checked_as_those_of_other_algorithms(registries) -> None:
    with pytest.raises(ConfigError, match=r"rollout.n must be at least 2: algo.advantage = 'win_rate'"):
        resolved("algo.advantage=win_rate", "rollout.n=1", plugin=REPO / "examples" / "my_advantage.py")


def test_stored_config_of_a_run_with_a_plugin_can_be_read_elsewhere(tmp_path: Path) -> None:
    """By a process that has not imported the plugin."""
    file = tmp_path / "mine.py"
    file.write_text((REPO / "examples" / "my_loss.py").read_text())
    code = (
        "import sys\nfrom pathlib import Path\nfrom posttrain.plan.command import stored_config\n"
        "print(stored_config(Path(sys.argv[1])).algo.policy_loss)"
    )
    tree = dump_toml(resolve("rl", "tiny-arith").config).replace('"clipped"', '"dro"')
    (tmp_path / "config.toml").write_text(re.sub(r"^plugins = .*$", f"plugins = ['{file}']", tree, flags=re.M))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPO, capture_output=True, text=True)
    assert done.stdout == "dro\n", done.stderr
    (tmp_path / "config.toml").write_text(tree)
    with pytest.raises(ConfigError, match=r"'dro'.*a name that a plugin registers"):
        stored_config(tmp_path)


# ---------------------------------------------------------------------- mistakes

MISTAKES = {
    "unknown loss": (["algo.policy_loss=meen"], "algo.policy_loss = 'meen' (--set): Input should be", "'mean'"),
    "unknown estimator": (["algo.advantage=grppo"], "algo.advantage = 'grppo' (--set): Input should be", "'grpo'"),
    "unknown option": (
        ["algo.policy_loss=mean", "algo.loss_kwargs={scale = 1.0, cuont = 2}"],
        "algo.loss_kwargs.cuont is no option of algo.policy_loss = 'mean': did you mean 'count'?",
        "",
    ),
    "key of algo": (
        ["algo.policy_loss=mean", "algo.loss_kwargs={scale = 1.0, clip_low = 0.1}"],
        "algo.loss_kwargs.clip_low is no option of algo.policy_loss = 'mean'",
        "",
    ),
    "missing option": (["algo.policy_loss=mean"], "algo.policy_loss = 'mean' needs algo.loss_kwargs.scale", ""),
    "text for a number": (["algo.policy_loss=mean", "algo.loss_kwargs.scale=x"], "scale = 'x'", ""),
    "infinite": (["algo.policy_loss=mean", "algo.loss_kwargs.scale=inf"], "scale = inf", ""),
    "truth value for a number": (["algo.policy_loss=mean", "algo.loss_kwargs.scale=true"], "a finite float", ""),
    "fraction for a count": (
        ["algo.policy_loss=mean", "algo.loss_kwargs={scale = 1, count = 1.5}"],
        "algo.loss_kwargs.count = 1.5: algo.policy_loss = 'mean' takes a finite int",
        "",
    ),
    "no options": (["algo.loss_kwargs.beta=1"], "is no option of algo.policy_loss = 'clipped': it has none", ""),
    "of another loss": (["algo.policy_loss=raises", "algo.dual_clip=3.0"], "algo.dual_clip has no effect", ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rejects_names_and_options_that_nothing_reads(plugin: Path, mistake: str) -> None:
    sets, message, hint = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        resolved("algo.name=grpo", *sets, plugin=plugin)
    assert hint in (caught.value.hint or "")


def test_options_have_the_values_of_keys_kwargs_and_defaults(plugin: Path) -> None:
    config = resolved("algo.policy_loss=mean", "algo.clip_low=0.3", "algo.loss_kwargs.scale=2", plugin=plugin)
    values = config.algo.loss_values
    assert (values["clip_low"], values["scale"]) == (0.3, 2)
    assert "count" not in values  # the function's own default


def test_a_plugin_that_reads_keys_of_others_takes_them_from_nobody(plugin: Path) -> None:
    shared = ["algo.gamma=0.9", "algo.kl_coef=0.1"]
    values = resolved("algo.policy_loss=keys", *shared, plugin=plugin).algo.loss_values
    assert (values["gamma"], values["kl_coef"]) == (0.9, 0.1)
    resolved("algo.advantage=gae", "algo.policy_loss=clipped", *shared, plugin=plugin)
    with pytest.raises(ConfigError, match=r"algo.gamma has no effect with algo.advantage = 'grpo'"):
        resolved(*shared, plugin=plugin)


def test_plugins_are_not_imported_for_names_that_are_known(registries, tmp_path: Path) -> None:
    assert resolved("algo.policy_loss=gspo", plugin=tmp_path / "missing.py").plugins == [f"{tmp_path}/missing.py"]
    with pytest.raises(ConfigError, match="plugin file not found"):
        resolved("algo.policy_loss=mine", plugin=tmp_path / "missing.py")


def test_a_name_that_is_taken_is_refused(registries, tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(
        "from posttrain.algos import policy_loss\n@policy_loss('clipped')\ndef clipped(logprobs, tokens): ...\n"
    )
    with pytest.raises(CodeError, match=r"policy loss 'clipped' is registered twice \(.*again.py, line 2\)"):
        resolved("algo.policy_loss=mine", plugin=tmp_path / "again.py")


def test_mistakes_of_plugin_functions_name_their_line(plugin: Path) -> None:
    resolved("algo.policy_loss=raises", plugin=plugin)
    three = torch.zeros(3)
    tokens = TokenInputs(three, three)
    for name, message in {
        "raises": r"policy loss 'raises' failed: AttributeError: .* \(.*mine.py, line 8\)",
        "mean": r"policy loss 'mean': the loss is a tensor of shape \[\], .* \[2\] \(.*mine.py, line 10\)",
        "metric": r"policy loss 'metric': entropy is a tensor of shape \[3\], .* \[2\]",
    }.items():
        with pytest.raises(CodeError, match=message):
            POLICY_LOSSES.get(name)(three[:2], tokens, {"clip_low": 0.2, "scale": 1.0})
    update = UpdateTokens(three, three, three, three.long(), three.bool(), torch.Generator())
    with pytest.raises(CodeError, match=r"policy loss 'column', prepare: the column is a tensor of shape \[1\]"):
        POLICY_LOSSES.get("column").column(update, {})
    episodes = Episodes(three, three.long(), three.bool(), torch.arange(3))
    with pytest.raises(CodeError, match=r"advantage estimator 'returns_none' returned NoneType \(.*mine.py, line"):
        ADVANTAGES.get("returns_none")(episodes, {})
    with pytest.raises(CodeError, match=r"advantage estimator 'raises' failed: KeyError: 'gone' \(.*mine.py, line"):
        ADVANTAGES.get("raises")(episodes, {})
