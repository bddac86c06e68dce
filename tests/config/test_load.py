import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashflow.config import Config, dump_config, load_config, stored_config
from flashflow.config.cautions import cautions
from flashflow.config.document import read_document, write_document
from flashflow.config.rules import HELD_OUT_SHARE
from flashflow.errors import ConfigError

REWARD = "def exact(completion, answer, **row):\n    return float(completion == answer)\n"
CONFIG = """\
model:
  path: builtin:quickstart
data:
  source: {kind: reasoning_gym, task: chain_sum, size: 4000}
reward:
  function: REWARD:exact
rollout:
  group_size: 4
  alpha: 1.5
batch:
  groups: 6
"""

PPO = ["algorithm.preset=ppo"]


@pytest.fixture
def config_file(tmp_path):
    """A function that writes a config of the text given after CONFIG, and returns its path."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)

    def write(text=""):
        path = tmp_path / "config.yaml"
        path.write_text(CONFIG.replace("REWARD", str(reward)) + text)
        return path

    return write


def mistakes(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.mistakes


def only(path, *overrides):
    found = mistakes(path, *overrides)
    assert len(found) == 1, found
    return found[0]


def test_derived_numbers_follow_from_the_fields(config_file):
    config = load_config(config_file())
    assert config.samples_per_batch == 24
    assert config.max_staleness == 2  # ceil(1.5)
    assert config.max_groups_in_flight == 15  # floor(2.5 x 6)
    assert config.run_folder == Path("runs/run")


def test_overrides_are_yaml_values_laid_over_the_file(config_file):
    config = load_config(
        config_file("optimizer:\n  lr: 1e-3\n"),
        ["rollout.alpha=0", "optimizer.lr=3e-4", "sampling.stop_strings=['</answer>']", "data.source.size=5000"],
    )
    assert config.rollout.alpha == 0
    assert config.optimizer.lr == 3e-4
    assert config.sampling.stop_strings == ["</answer>"]
    assert config.data.source.size == 5000


def test_an_empty_section_has_its_defaults(config_file):
    assert load_config(config_file("sampling:\n")).sampling.max_new_tokens == 512


def test_numbers_with_an_exponent_need_no_point(config_file):
    assert load_config(config_file("optimizer:\n  lr: 1e-6\n")).optimizer.lr == 1e-6


def test_the_dumped_config_loads_again_equal(config_file, tmp_path):
    config = load_config(
        config_file("algorithm: {preset: dapo, kl_coefficient: 1e-3, correction: {kind: mask}}\n"),
        ["sampling.stop_strings=['1e-6', 'no', '0x10', '']", "run.folder=somewhere/else", "data.epochs=3"],
    )
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert stored_config(again) == config
    assert load_config(again) == config


def test_every_mistake_is_reported_at_once_with_its_line(config_file):
    path = config_file("sampling:\n  max_new_token: 4\noptimizer:\n  lr: -1\n  betas: [0.9]\nmodle: {}\n")
    assert mistakes(path, "rollout.group_size=0") == [
        f"modle: {{}} is given to an unknown key; did you mean model? ({path}, line 17)",
        "sampling.max_new_token: 4 is given to an unknown key; "
        f"did you mean sampling.max_new_tokens? ({path}, line 13)",
        "rollout.group_size: 0 must be greater than 0 (command line)",
        f"optimizer.lr: -1 must be at least 0.0 ({path}, line 15)",
        f"optimizer.betas: has too few values; place 1 is missing ({path}, line 16)",
    ]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.group_size='8'", "rollout.group_size: '8' must be a whole number"),
        ("rollout.group_size=8.5", "rollout.group_size: 8.5 must be a whole number"),
        ("rollout.alpha=.inf", "rollout.alpha: inf must be a finite number"),
        ("rollout.on_stale=wiat", "rollout.on_stale: 'wiat' must be 'wait' or 'drop'; did you mean wait?"),
        ("data.shuffle=1", "data.shuffle: 1 must be true or false"),
        ("sampling=7", "sampling: 7 must map field names to values"),
        ("sampling.stop_strings=x", "sampling.stop_strings: 'x' must be a list"),
        ("run.name=a/b", "run.name: 'a/b' must match"),
        ("engine.slots=12", "engine.slots: 12 must be a multiple of 8"),
        ("data.source.kind=jsonnl", "data.source.kind: 'jsonnl' is no kind of source; did you mean jsonl?"),
        ("data.source.tsak=x", "data.source.tsak: 'x' is given to an unknown key; did you mean data.source.task?"),
        ("rollout.alpha.x=1", "rollout.alpha.x: rollout.alpha is 1.5, which has no fields to override"),
        ("rollout.alpha", "rollout.alpha: not an override; write section.key=value"),
        ("=3", "=3: not an override; write section.key=value"),
        ("rollout.alpha=[", "rollout.alpha: command line: not valid YAML"),
        ("algorithm.preset=grppo", "algorithm.preset: unknown preset 'grppo': did you mean 'grpo'?"),
        ("algorithm.surogate=tis", "algorithm.surogate: unknown option: did you mean 'surrogate'?"),
    ],
)
def test_a_mistake_names_path_value_and_remedy(config_file, override, says):
    assert only(config_file(), override).startswith(says)


def test_a_missing_section_and_a_missing_field_are_named(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {}\ndata: {source: {task: x}}\n")
    assert [mistake.split(";")[0] for mistake in mistakes(path)] == [
        "data.source: kind is missing",
        "reward: missing",
        "model.path: missing",
    ]


def test_a_key_given_twice_is_refused(config_file):
    assert "rollout: given twice" in only(config_file("rollout:\n  group_size: 2\n"))


def test_bad_yaml_and_a_missing_file_are_config_mistakes(config_file, tmp_path):
    assert "not valid YAML" in only(config_file("a: [\n"))
    assert "cannot be read" in only(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "got a list" in only(tmp_path / "list.yaml")
    (tmp_path / "loop.yaml").write_text("a: &a {b: *a}\n")
    assert "an alias that holds itself" in only(tmp_path / "loop.yaml")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["sampling.max_new_tokens=2048"], ["sampling.max_new_tokens: 2048", "engine.max_context_tokens 2048"]),
        (
            ["evaluation.every_steps=1", "evaluation.max_new_tokens=4096"],
            ["evaluation.max_new_tokens: 4096", "engine.max_context_tokens 2048"],
        ),
        (["optimizer.warmup_steps=100"], ["optimizer.warmup_steps: 100", "run.steps 100"]),
        (["optimizer.min_lr_fraction=0.1"], ["optimizer.min_lr_fraction: 0.1", "optimizer.decay constant"]),
        (
            ["evaluation.every_steps=1", "evaluation.problems=801"],
            ["evaluation.problems: 801", "data.source.size 4000"],
        ),
        (["data.prompt_column=question"], ["data.prompt_column: 'question'", "data.source.kind reasoning_gym"]),
        (["network.heartbeat_s=10"], ["network.heartbeat_s: 10.0", "network.peer_deadline_s 10.0"]),
        (["network.long_poll_s=60"], ["network.long_poll_s: 60.0", "network.call_deadline_s 60.0"]),
        (["rollout.turn_deadline_s=601"], ["rollout.turn_deadline_s: 601.0", "rollout.trajectory_deadline_s 600.0"]),
        (["rollout.group_size=1"], ["algorithm.estimator: grpo", "rollout.group_size = 1"]),
        (["optimizer.min_lr_fraction=0.5"], ["optimizer.min_lr_fraction: 0.5", "optimizer.decay constant"]),
        (["batch.optimizer_steps=4"], ["batch.optimizer_steps: 4", "batch.groups 6"]),
        (["critic.kind=value_head"], ["critic: value_head", "algorithm.estimator grpo"]),
        (["critic={}"], ["critic: value_head", "algorithm.estimator grpo"]),
        ([*PPO, "critic.warmup_steps=100"], ["critic.warmup_steps: 100", "run.steps 100"]),
        ([*PPO, "critic.min_lr_fraction=0.5"], ["critic.min_lr_fraction: 0.5", "critic.decay constant"]),
        ([*PPO, "critic.path=org/name"], ["critic.path: 'org/name'", "critic.kind value_head"]),
        (
            [*PPO, "critic.kind=model", "critic.loss_coefficient=0.5"],
            ["critic.loss_coefficient: 0.5", "critic.kind model"],
        ),
        ([*PPO, "critic.kind=model", "critic.path=./nowhere"], ["critic.path: './nowhere'", "no folder"]),
        (["model.path=builtin:large"], ["model.path: 'builtin:large'", "builtin:quickstart"]),
        (["model.path=./nowhere"], ["model.path: './nowhere'", "no folder"]),
    ],
)
def test_a_contradiction_names_both_fields_and_both_values(config_file, overrides, names):
    mistake = only(config_file(), *overrides)
    assert [name for name in names if name not in mistake] == []


def test_a_critic_may_be_left_out_and_stays_left_out_in_the_dumped_config(config_file, tmp_path):
    again = tmp_path / "again.yaml"
    for overrides, kind in ([], None), (PPO, None), ([*PPO, "critic.kind=model"], "model"), ([*PPO, "critic="], None):
        config = load_config(config_file(), overrides)
        assert (config.critic and config.critic.kind) == kind
        again.write_text(dump_config(config))
        assert load_config(again) == config


def test_a_mistake_in_the_critic_is_named_like_any_other(config_file):
    assert mistakes(config_file(), *PPO, "critic.lr=-1", "critic.knd=model", "critic.kind=tree") == [
        "critic.lr: -1 must be at least 0.0 (command line)",
        "critic.kind: 'tree' must be 'value_head' or 'model' (command line)",
        "critic.knd: 'model' is given to an unknown key; did you mean critic.kind? (command line)",
    ]
    assert mistakes(config_file(), "algorithm.preset=grppo", "critic={}") == [
        "algorithm.preset: unknown preset 'grppo': did you mean 'grpo'? (command line)"
    ]


def test_rules_run_on_right_sections_beside_wrong_ones(config_file):
    found = mistakes(config_file(), "optimizer.warmup_steps=100", "rollout.alpha=-1", "reward.function=nowhere.py:f")
    assert [mistake.partition(":")[0] for mistake in found] == [
        "rollout.alpha",
        "optimizer.warmup_steps",
        "reward.function",
    ]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("json:dumps", None),
        ("flashflow.config.load:load_config", None),
        ("exact", "must be module:function"),
        ("no_such_module_here:f", "no module no_such_module_here"),
        ("flashflow.config.nowhere:f", "no module flashflow.config.nowhere"),
        ("flashflow.config.load:load_confg", "defines no load_confg; did you mean load_config?"),
        ("nowhere.py:f", "no file nowhere.py"),
    ],
)
def test_the_reward_must_be_defined(config_file, function, says):
    if says is None:
        load_config(config_file(), [f"reward.function={function}"])
    else:
        assert says in only(config_file(), f"reward.function={function}")


def test_looking_for_a_reward_executes_nothing(config_file, tmp_path):
    (tmp_path / "loud.py").write_text("raise SystemExit('executed')\nif True:\n    from math import sqrt as f\n")
    load_config(config_file(), [f"reward.function={tmp_path}/loud.py:f"])
    (tmp_path / "torn.py").write_text("def f(:\n")
    assert "cannot be read as Python" in only(config_file(), f"reward.function={tmp_path}/torn.py:f")


def test_data_files_must_exist_and_evaluation_needs_its_own(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x"}\n')
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {path: org/name}\n"
        "reward: {function: 'json:dumps'}\n"
        f"data: {{source: {{kind: jsonl, path: {rows}}}}}\n"
    )
    load_config(config)
    assert "data.source.eval_path is null" in only(config, "evaluation.every_steps=5")
    assert "equals data.source.path" in only(config, f"data.source.eval_path={rows}")
    assert "data.source.path: 'nowhere.jsonl' is not a file" in only(config, "data.source.path=nowhere.jsonl")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.on_stale=drop"], "favours short answers"),
        (["evaluation.every_steps=1", "evaluation.problems=256"], "+-3.1 points"),  # 50 / sqrt(256)
        (["batch.micro_batch_tokens=511"], "batch.micro_batch_tokens: 511"),
        (["rollout.concurrency=31"], "rollout.concurrency: 31"),
        (["batch.groups=3"], "the 28 samples"),  # floor(2.5 x 3) = 7 groups of 4
        (["model.dtype=bfloat16", "model.device=cpu"], "model.dtype: bfloat16"),
        (["run.runtime=in_process", "placement.max_restarts=1"], "placement.max_restarts: 1"),
        (["checkpoint.every_steps=0"], "checkpoint.every_steps: 0"),
        (["checkpoint.every_steps=0"], "the journal on disk and the ledger in memory grow until the end"),
        (["rollout.concurrency=65", "engine.slots=8"], "rollout.concurrency: 65"),
        (["rollout.concurrency=33", "placement.env=4", "engine.slots=8", "placement.engine=2"], "placement.env 4 is"),
        (["network.interface=8.8.8.8"], "network.interface: 8.8.8.8 is a public address"),
        (["network.interface='2001:4860:4860::8888'"], "is a public address"),
        (["network.interface=192.0.2.7"], "network.interface: 192.0.2.7 is no address and no interface of this host"),
        (["network.interface=localhost"], "network.interface: localhost is no address"),
    ],
)
def test_what_has_a_price_is_said(config_file, overrides, says):
    found = cautions(load_config(config_file(), overrides))
    assert [caution for caution in found if says in caution] != []


@pytest.mark.parametrize(
    ("overrides", "unsaid"),
    [
        (["rollout.concurrency=64", "engine.slots=8"], "rollout.concurrency"),  # 8 x 8
        (["network.interface=10.255.255.254"], "public"),
        (["network.interface='fd00::1'"], "public"),
        (["network.interface=localhost"], "public"),
    ],
)
def test_what_has_no_price_is_not_said(config_file, overrides, unsaid):
    assert [caution for caution in cautions(load_config(config_file(), overrides)) if unsaid in caution] == []


def test_the_defaults_are_the_unbiased_mode(config_file):
    assert cautions(load_config(config_file())) == []


def test_the_held_out_share_is_the_data_readers():
    from flashflow.data import split

    assert split.HELD_OUT_SHARE == HELD_OUT_SHARE


def test_every_field_says_what_it_is():
    definitions = Config.model_json_schema()["$defs"]
    silent = [
        f"{section}.{name}"
        for section, model in definitions.items()
        for name, field in model["properties"].items()
        if name != "kind" and "description" not in field
    ]
    assert silent == []


def test_a_loss_of_ones_own_must_be_defined(config_file):
    found = mistakes(config_file(), "algorithm.loss=flashflow.algorithms.losses:no_such_loss")
    assert any(mistake.startswith("algorithm.loss: ") and "defines no no_such_loss" in mistake for mistake in found)


def test_a_loss_of_ones_own_may_stand_in_a_file(config_file, tmp_path):
    (tmp_path / "my_loss.py").write_text("def half(terms):\n    return -terms.advantages * terms.logp / 2\n")
    load_config(config_file(), [f"algorithm.loss={tmp_path}/my_loss.py:half"])
    assert "defines no hlaf" in only(config_file(), f"algorithm.loss={tmp_path}/my_loss.py:hlaf")


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1), plain_values, max_size=4))
def test_what_is_written_reads_back_the_same(values):
    assert read_document(write_document(values), "test").values == values


def test_texts_that_look_like_numbers_or_switches_stay_texts():
    texts = ["1e-6", "no", "on", "2026-01-01", "0x10", "010", "", "null", "~", "1_000", ".inf", "1:30"]
    assert read_document(write_document(texts), "test").values == texts
    assert read_document("[no, on, 2026-01-01, 010, 1e-6, .inf]", "test").values == [
        "no", "on", "2026-01-01", 10, 1e-6, math.inf,
    ]  # fmt: skip


def test_a_truncated_distribution_is_refused_with_the_reason(config_file):
    path = config_file("sampling: {top_p: 0.9}\n")
    (mistake,) = mistakes(path)
    assert mistake.startswith("sampling.top_p: 0.9 would record log-probabilities of the truncated distribution")
    assert "w would not be 1 for unchanged weights" in mistake
