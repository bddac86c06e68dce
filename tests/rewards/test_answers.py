import pytest

from flashflow.rewards.answers import format_and_answer


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<answer>12</answer>", 1.0),
        ("7 + 5 is <answer> 12\n</answer>.", 1.0),
        ("<answer>13</answer>", 0.2),
        ("<answer></answer>", 0.2),
        ("<answer>12</answer> <answer>12</answer>", 0.0),
        ("<answer>12", 0.0),
        ("12", 0.0),
    ],
)
def test_the_format_earns_a_share_and_the_right_answer_the_rest(completion, reward):
    found = format_and_answer(completion, "12", metadata={})
    assert found["reward"] == reward
    assert found["format"] == float(reward > 0)
    assert found["correct"] == float(reward == 1)


def test_the_share_of_the_format_is_an_argument():
    assert format_and_answer("<answer>1</answer>", "2", format_share=0.5)["reward"] == 0.5


def test_the_format_is_an_argument():
    texts = ("The answer is 12.", "The answer is -12.", "The answer is twelve.")
    found = [format_and_answer(text, "12", pattern=r"The answer is (-?\d+)\.")["reward"] for text in texts]
    assert found == [1, 0.2, 0]
