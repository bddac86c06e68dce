import asyncio
import subprocess
import sys

import numpy as np
import pytest

from flashflow import reward
from flashflow.errors import ConfigError, RewardError
from flashflow.rewards.base import RewardFunction, Scored
from flashflow.rewards.load import load_reward

ROW = {"prompt": "2 + 2?", "answer": "4", "metadata": {"terms": 2}}


def score(function, completion="4", row=ROW, arguments=None, prompt="2 + 2?") -> Scored:
    return asyncio.run(RewardFunction(function, arguments or {}, name="f").score(prompt, completion, row))


# ---- what a function is given


def test_a_function_gets_only_the_columns_it_declares():
    def exact(completion, answer):
        return float(completion == answer)

    assert score(exact) == Scored(1.0, {})
    assert score(exact, completion="5") == Scored(0.0, {})


def test_a_function_with_keywords_gets_everything_once():
    seen = {}

    def everything(completion, **row):
        seen.update(row)
        return 0.0

    score(everything)
    assert seen == ROW


def test_a_function_that_declares_the_prompt_gets_its_text():
    def echo(prompt, completion):
        return float(prompt == "text")

    row = {"prompt": [{"role": "user", "content": "text"}]}
    assert score(echo, prompt="text", row=row).reward == 1.0


def test_the_configs_arguments_go_before_columns_of_the_same_name():
    def scaled(completion, answer, scale):
        return scale * float(completion == answer)

    assert score(scaled, arguments={"scale": 0.5}).reward == 0.5
    assert score(scaled, arguments={"scale": 0.5, "answer": "x"}).reward == 0.0


def test_a_missing_column_is_named_with_those_there_are():
    def exact(completion, solution):
        return 1.0

    with pytest.raises(RewardError, match="f needs solution; the columns of the row are answer, metadata, prompt"):
        score(exact)


def test_an_async_function_is_awaited():
    async def exact(completion, answer):
        await asyncio.sleep(0)
        return float(completion == answer)

    assert score(exact).reward == 1.0


def test_a_callable_object_is_a_function():
    class Exact:
        async def __call__(self, completion, answer):
            return float(completion == answer)

    assert score(Exact()).reward == 1.0


# ---- TRL's form


def test_the_batched_form_gets_lists_of_one():
    def exact(prompts, completions, answer, **columns):
        assert prompts == ["2 + 2?"]
        assert columns == {"metadata": [{"terms": 2}]}
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    assert score(exact) == Scored(1.0, {})


def test_the_batched_form_gets_messages_where_the_dataset_has_messages():
    asked = [{"role": "user", "content": "2 + 2?"}]

    def exact(prompts, completions, **columns):
        assert prompts == [asked]
        assert completions == [[{"role": "assistant", "content": "4"}]]
        return [None]

    assert score(exact, row={"prompt": asked}) == Scored(None, {})


def test_a_batched_function_that_returns_another_number_of_rewards_is_named():
    def two(completions):
        return [1.0, 2.0]

    with pytest.raises(RewardError, match=r"returned \[1.0, 2.0\] \(list\) for 1 completion"):
        score(two)


# ---- what a function may return


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, Scored(0.25, {})),
        (True, Scored(1.0, {})),
        (np.float32(0.5), Scored(0.5, {})),
        (None, Scored(None, {})),
        ({"reward": 1, "format": 0.5, "length": None}, Scored(1.0, {"format": 0.5})),
        ({"reward": None, "format": 0.5}, Scored(None, {"format": 0.5})),
    ],
)
def test_a_finite_number_none_or_components_are_taken(value, expected):
    assert score(lambda completion: value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), r"the reward is nan \(float\); expected a finite number or None"),
        (float("-inf"), r"the reward is -inf"),
        ("1.0", r"the reward is '1.0' \(str\)"),
        ([1.0], r"the reward is \[1.0\] \(list\)"),
        ({"format": 1.0}, r"needs the key `reward`"),
        ({"reward": 1.0, "format": float("inf")}, r"component 'format' is inf"),
    ],
)
def test_any_other_value_is_named(value, message):
    with pytest.raises(RewardError, match=message):
        score(lambda completion: value)


def test_a_function_that_raises_is_reported_with_its_traceback():
    def broken(completion):
        return {}["no such key"]

    with pytest.raises(RewardError, match=r"(?s)in broken.*KeyError: 'no such key'"):
        score(broken)

    async def broken_too(completion):
        raise ValueError("later")

    with pytest.raises(RewardError, match=r"(?s)in broken_too.*ValueError: later"):
        score(broken_too)


# ---- the decorator


def test_the_decorator_leaves_the_function_callable():
    @reward
    def exact(completion, answer):
        return float(completion == answer)

    assert exact("4", "4") == 1.0


def test_the_decorator_refuses_a_function_without_a_completion():
    with pytest.raises(ConfigError, match=r"no parameter `completion`.*it has: answer"):

        @reward
        def exact(answer):
            return 1.0


# ---- loading


def test_a_function_is_loaded_from_a_module():
    assert load_reward("flashflow.quickstart.task:exact_answer", {}).asynchronous is False


def test_a_function_is_loaded_from_a_file_with_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("ONE = 1.0\n")
    (tmp_path / "mine.py").write_text(
        "from neighbour_of_reward import ONE\nasync def score(completion, scale): return ONE * scale\n"
    )
    function = load_reward(f"{tmp_path / 'mine.py'}:score", {"scale": 3})
    assert function.asynchronous
    assert asyncio.run(function.score("p", "c", {})) == Scored(3.0, {})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exact_answer", "expected `module:function` or `file.py:function`"),
        ("flashflow.quickstart.task:exact_answr", "has no 'exact_answr'; nearest: exact_answer"),
        ("flashflow.no_such_module:f", "no module 'flashflow.no_such_module'"),
        ("no_such_package.module:f", "no module 'no_such_package'"),
        ("no/such/file.py:f", "no file no/such/file.py"),
        ("flashflow.quickstart.task:GUESS_ERROR", "is a int, not a function"),
        ("flashflow.quickstart.recipe:Recipe", "not a function"),
    ],
)
def test_a_mistake_in_the_name_is_told(function, message):
    with pytest.raises(ConfigError, match=message):
        load_reward(function, {})


def test_arguments_the_function_does_not_take_are_told_all_at_once():
    def exact(completion, scale=1.0):
        return scale

    with pytest.raises(ConfigError) as caught:
        RewardFunction(exact, {"scael": 2, "completion": "x", "other": 1}, name="exact")
    assert [mistake.split(": ")[1] for mistake in caught.value.mistakes] == [
        "reward.arguments.completion is set by flashflow",
        "reward.arguments.other",
        "reward.arguments.scael",
    ]


def test_what_users_import_never_imports_torch():
    code = (
        "import sys; from flashflow import reward, environment\n"
        "import flashflow.roles.reward, flashflow.rewards.worker\n"
        "import flashflow.quickstart.task, flashflow.environments.single_turn\n"
        "assert not {'torch', 'transformers', 'reasoning_gym'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
