"""Rewards for a final answer that stands in a given format."""

import re
from typing import Any

TAGS = r"<answer>(.*?)</answer>"


def format_and_answer(
    completion: str, answer: str, *, pattern: str = TAGS, format_share: float = 0.2, **row: Any
) -> dict[str, float]:
    """`format_share` for exactly one match of `pattern`, the rest if its group is the right answer; together 1.0.

    A model that answers in its own words gets 0 at first; the share of the format leads it to where the answer counts.
    pattern: a regular expression with one group, the answer.
    """
    found = re.findall(pattern, completion, re.DOTALL)
    formatted = len(found) == 1
    correct = formatted and found[0].strip() == answer.strip()
    reward = 1.0 if correct else format_share * formatted
    return {"reward": reward, "format": float(formatted), "correct": float(correct)}
