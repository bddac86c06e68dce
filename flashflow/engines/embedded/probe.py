"""At start-up: is a sample independent of its batch mates to the last bit on this machine, with this model?

The shape rules of flashflow/shapes.py are habits of the linear-algebra library. This probe checks what follows from
them: the logits after a sequence are the same alone, in a full batch, and however much of it came by prefill.
"""

import numpy as np
import torch

from flashflow.engines.embedded.runner import Runner
from flashflow.engines.uniform import Int64Array
from flashflow.shapes import safe_rows

_LENGTHS = (21, 90, 150, 300, 600, 1100)
"""Tokens; on both sides of every border of `cache_length` up to the second block."""
_BUDGET = 2e11
"""Multiplications: about a second of one core."""
_TAIL = 3
"""Tokens that come by decode steps in the one case and by prefill in the other."""


@torch.inference_mode()
def differences(runner: Runner, max_slots: int, max_context_tokens: int) -> list[str]:
    """What was found to differ, for a person; [] when all was equal. Leaves rubbish in the cache."""
    found = []
    slots = min(max_slots, runner.cache.slots)
    for length in _affordable_lengths(runner, max_context_tokens):
        sequence = _tokens(runner, seed=length, count=length)
        alone = _logits(runner, sequence, slot=0, by_decode=0)
        cases = {
            "in a full batch than alone": _logits_among_mates(runner, sequence, slots),
            "after decode steps than after prefill": _logits(runner, sequence, slot=slots // 2, by_decode=_TAIL),
        }
        for case, logits in cases.items():
            if not torch.equal(logits, alone):
                gap = (logits - alone).abs().max().item()
                found.append(f"logits of a {length}-token sequence differ {case}, by up to {gap:.1e}")
    return found


def _affordable_lengths(runner: Runner, max_context_tokens: int) -> list[int]:
    """At least the shortest length, cut to the context."""
    per_token = sum(parameter.numel() for parameter in runner.model.parameters())
    chosen: list[int] = []
    spent = 0.0
    for length in _LENGTHS:
        spent += per_token * (2.0 * length + (_TAIL + 2) * safe_rows(1) + 2.0 * runner.cache.slots)
        if chosen and (spent > _BUDGET or length > max_context_tokens):
            break
        chosen.append(min(length, max_context_tokens))
    return chosen


def _tokens(runner: Runner, seed: int, count: int) -> Int64Array:
    return np.random.default_rng(seed).integers(0, runner.vocab_size, count)


def _logits(runner: Runner, sequence: Int64Array, *, slot: int, by_decode: int) -> torch.Tensor:
    """Logits [V] after the sequence, alone in the cache; its last 1 + by_decode tokens come by decode steps."""
    rows = safe_rows(slot + 1)
    first = max(0, len(sequence) - 1 - by_decode)
    if first:
        runner.prefill([slot], [sequence[:first]])
    slots_N = np.where(np.arange(rows) == slot, slot, -1)
    logits = torch.empty(0)
    for position in range(first, len(sequence)):
        tokens_N, positions_N = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        tokens_N[slot], positions_N[slot] = sequence[position], position
        logits = runner.decode(tokens_N, positions_N, slots_N)[slot].clone()
    return logits


def _logits_among_mates(runner: Runner, sequence: Int64Array, slots: int) -> torch.Tensor:
    """The same in the last slot of a full batch with mates at other positions, one of them at the end of the cache."""
    rows, own, last = safe_rows(slots), slots - 1, len(sequence) - 1
    if last:
        mates = [0] if own else []
        sequences = [_tokens(runner, seed=mate, count=last) for mate in mates]
        runner.prefill([*mates, own], [*sequences, sequence[:-1]])
    numbers = np.arange(rows)
    tokens_N = _tokens(runner, seed=last, count=rows)
    positions_N = numbers % runner.cache.length
    positions_N[0] = runner.cache.length - 1
    tokens_N[own], positions_N[own] = sequence[-1], last
    return runner.decode(tokens_N, positions_N, np.where(numbers < slots, numbers, -1))[own].clone()
