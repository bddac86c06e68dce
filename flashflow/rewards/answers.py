"""Rewards for answers in tags: `<answer>...</answer>`."""

import re
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def format_and_answer(completion: str, answer: str, *, format_share: float = 0.2, **row: Any) -> dict[str, float]:
    """`format_share` for exactly one pair of tags, the rest for the right answer in it; together 1.0.

    A model that answers in its own words gets 0 at first; the share of the format leads it to where the answer counts.
    """
    found = ANSWER.findall(completion)
    formatted = len(found) == 1
    correct = formatted and found[0].strip() == answer.strip()
    reward = 1.0 if correct else format_share * formatted
    return {"reward": reward, "format": float(formatted), "correct": float(correct)}
