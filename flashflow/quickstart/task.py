"""The quickstart's task: sums of two numbers, worked out column by column. Free of torch.

A worked sum has the units first: `47 + 85` -> `7+5=12, 4+8+1=13 <answer>132</answer>`; a difference below zero is
worked the other way round: `55 - 85` -> `negative: 5-5=0, 8-5-0=3 <answer>-30</answer>`.
"""

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from flashflow.data.packages import optional_package
from flashflow.data.split import is_held_out
from flashflow.quickstart.recipe import Recipe

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
SEED_STRIDE = 1_000_000
"""reasoning-gym makes problem i of seed s from s + i: seeds this far apart share none."""
GUESS_ERROR = 15
"""A guess is off by a uniform whole number between 0 and this, either way."""


def exact_answer(completion: str, answer: str, **row: Any) -> float:
    """1.0 if the last `<answer>` holds exactly the right answer, else 0.0 (no partial credit, unlike chain_sum)."""
    found = ANSWER.findall(completion)
    return 1.0 if found and found[-1].strip() == answer else 0.0


def training_problems(recipe: Recipe, seed: int) -> Iterator[Mapping[str, Any]]:
    """Endless: questions that data.sources does not hold out, with `question`, `answer` and `metadata`."""
    reasoning_gym = optional_package("reasoning_gym", "reasoning-gym", "model.path: builtin:quickstart")
    first = SEED_STRIDE * (seed + 1)
    problems = reasoning_gym.create_dataset(recipe.task, **recipe.options, size=2**31 - 1, seed=first)
    index = 0
    while True:
        problem = problems[index]
        if not is_held_out(problem["question"]):
            yield problem
        index += 1


def demonstration(problem: Mapping[str, Any], guess_probability: float, rng: random.Random) -> str:
    """What the warm start shows: a worked sum, or a guess."""
    if rng.random() < guess_probability:
        return guess(int(problem["answer"]), rng)
    return worked(problem["metadata"]["expression"])


def guess(answer: int, rng: random.Random) -> str:
    return f"<answer>{answer + rng.choice([-1, 1]) * rng.randint(0, GUESS_ERROR)}</answer>"


def worked(expression: str) -> str:
    """`x + y` or `x - y` of whole numbers >= 0, worked out column by column."""
    left, operator, right = expression.split()
    x, y = int(left), int(right)
    negative = operator == "-" and x < y
    if negative:
        x, y = y, x
    columns = _addition(x, y) if operator == "+" else _subtraction(x, y)
    value = x + y if operator == "+" else x - y
    return f"{'negative: ' if negative else ''}{', '.join(columns)} <answer>{-value if negative else value}</answer>"


def _addition(x: int, y: int) -> list[str]:
    columns, carry = [], 0
    for place, (p, q) in enumerate(_digits(x, y)):
        total = p + q + carry
        columns.append(f"{p}+{q}{f'+{carry}' if place else ''}={total}")
        carry = total // 10
    return columns


def _subtraction(x: int, y: int) -> list[str]:
    """Of x >= y; a column that borrows shows ten more on the left."""
    columns, borrow = [], 0
    for place, (p, q) in enumerate(_digits(x, y)):
        lent = 10 if p - q - borrow < 0 else 0
        columns.append(f"{p + lent}-{q}{f'-{borrow}' if place else ''}={p + lent - q - borrow}")
        borrow = lent // 10
    return columns


def _digits(x: int, y: int) -> list[tuple[int, int]]:
    """Pairs of digits, units first."""
    width = max(len(str(x)), len(str(y)))
    return [(x // 10**place % 10, y // 10**place % 10) for place in range(width)]
