"""A batch with everything in it, and the formulas of the algorithms once more, in plain Python loops.

The loops share nothing with the package: no tensor, no autograd; derivatives are written out by hand.
"""

import math
import random
from dataclasses import dataclass

import torch

from flashflow.algorithms.losses import Denominators, LossConfig, LossResult, policy_loss
from flashflow.algorithms.ratios import Terms

Rows = list[list[float]]

MASK = [
    [0, 1, 1, 0, 1, 1, 0],
    [1, 1, 1, 1, 1, 1, 1],
    [0, 0, 0, 0, 0, 0, 0],
    [0, 0, 1, 0, 0, 0, 0],
    [0, 1, 0, 1, 0, 1, 1],
    [1, 1, 1, 0, 0, 0, 0],
]
"""Holes, different lengths, and one sequence without any."""
REWARDS = [1.0, 0.0, 1.0, 0.5, -1.0, 1.0]


@dataclass(frozen=True)
class Case:
    logp: Rows
    prox: Rows
    behaviour: Rows
    ref: Rows
    advantages: Rows
    entropy: Rows
    mask: list[list[int]]
    rewards: list[float]
    lags: list[list[int]]


def make_case(seed: int = 0, spread: float = 0.6, mask: list[list[int]] | None = None) -> Case:
    """Log-probabilities that differ by about `spread` nats, so r, w and rho are far from 1."""
    generator = random.Random(seed)
    mask = MASK if mask is None else mask
    rows, width = len(mask), len(mask[0])

    def noise(scale: float) -> Rows:
        return [[generator.gauss(0, scale) for _ in range(width)] for _ in range(rows)]

    def near(values: Rows) -> Rows:
        return [
            [min(-0.01, v + n) for v, n in zip(*pair, strict=True)] for pair in zip(values, noise(spread), strict=True)
        ]

    logp = [[-0.05 - abs(v) for v in row] for row in noise(1.5)]
    prox = near(logp)
    return Case(
        logp=logp,
        prox=prox,
        behaviour=near(prox),
        ref=near(logp),
        advantages=noise(1.0),
        entropy=[[abs(v) for v in row] for row in noise(1.0)],
        mask=mask,
        rewards=[REWARDS[row % len(REWARDS)] for row in range(rows)],
        lags=[[generator.randrange(4) for _ in range(width)] for _ in range(rows)],
    )


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def poisoned(values: Rows, mask: list[list[int]]) -> torch.Tensor:
    """`values` with NaN, inf and -inf in turn outside the mask."""
    poison = [math.nan, math.inf, -math.inf]
    return tensor(
        [
            [v if m else poison[(i + t) % 3] for t, (v, m) in enumerate(zip(row, mask_row, strict=True))]
            for i, (row, mask_row) in enumerate(zip(values, mask, strict=True))
        ]
    )


def evaluate(
    config: LossConfig, case: Case, *, denominators: Denominators | None = None, rows: list[int] | None = None
) -> tuple[LossResult, torch.Tensor]:
    """policy_loss on (some rows of) the case, poisoned outside the mask, and its gradient [B,T]."""
    rows = list(range(len(case.mask))) if rows is None else rows
    mask = [case.mask[b] for b in rows]

    def some(values: Rows) -> torch.Tensor:
        return poisoned([values[b] for b in rows], mask)

    logp = some(case.logp).requires_grad_()
    result = policy_loss(
        config,
        logprobs=logp,
        prox_logprobs=some(case.prox),
        behaviour_logprobs=some(case.behaviour),
        advantages=some(case.advantages),
        mask=torch.tensor(mask),
        ref_logprobs=some(case.ref),
        rewards=tensor([case.rewards[b] for b in rows]),
        denominators=denominators,
        entropy=some(case.entropy),
        lags=torch.tensor([case.lags[b] for b in rows]),
    )
    (gradient,) = torch.autograd.grad(result.loss, logp)
    return result, gradient


def half_reinforce(terms: Terms) -> torch.Tensor:
    """A loss of one's own."""
    return -terms.advantages * terms.logp / 2


def one_number(terms: Terms) -> torch.Tensor:
    """A loss of one's own with the wrong shape."""
    return terms.logp.sum()


# ---- the formulas once more


def clamp(x: float, low: float = -20.0, high: float = 20.0) -> float:
    return max(low, min(high, x))


@dataclass
class Token:
    """One masked-in token, with what the formulas need."""

    A: float
    logp: float
    mu: float
    r: float
    w: float
    rho: float


def clip_pair(x: float, A: float, el: float, eh: float, dual: float | None) -> tuple[float, float]:
    """(loss, d loss / d x) of max(-xA, -clip(x)A), and the dual clip."""
    plain, cut = -x * A, -clamp(x, 1 - el, 1 + eh) * A
    loss, slope = (plain, -A) if plain >= cut else (cut, 0.0)
    if dual is not None and A < 0 and loss > -dual * A:
        loss, slope = -dual * A, 0.0
    return loss, slope


def token_loss(config: LossConfig, token: Token, tokens: list[Token], reward: float) -> tuple[float, float]:
    """(L, dL/dlogp of the same token); not for gspo."""
    A, r, w, rho = token.A, token.r, token.w, token.rho
    name = config.surrogate
    if name in ("clip", "decoupled"):
        el = 0.2 if config.clip_low is None else config.clip_low
        eh = 0.2 if config.clip_high is None else config.clip_high
        loss, slope = clip_pair(r, A, el, eh, config.dual_clip)
        factor = min(w, config.w_bound) if name == "decoupled" else 1.0
        return factor * loss, factor * slope * r
    if name == "cispo":
        eh = 0.2 if config.clip_high is None else config.clip_high
        weight = min(r, 1 + eh)
        if config.clip_low is not None:
            weight = max(weight, 1 - config.clip_low)
        return -weight * A * token.logp, -weight * A
    if name == "tis":
        weight = clamp(rho, config.rho_low, config.rho_high)
        return -weight * A * token.logp, -weight * A
    if name in ("topr", "weighted_topr"):
        plus, minus = (config.weight_positive, config.weight_negative) if name == "weighted_topr" else (1.0, 1.0)
        whole = math.exp(clamp(sum(other.logp - other.mu for other in tokens)))
        taper = clamp(rho if config.level == "token" else whole, config.rho_low, config.rho_high)
        weight = plus if reward > 0 else minus * taper
        return -weight * A * token.logp, -weight * A
    if name == "reinforce":
        return -A * token.logp, -A
    if name == "kimi":
        gap = token.logp - token.mu
        return -A * token.logp + config.kimi_tau / 2 * gap * gap, -A + config.kimi_tau * gap
    if name == "dppo_tv":
        shift, gap = math.exp(token.logp) - math.exp(token.mu), token.logp - token.mu
        keep = not ((A > 0 and shift > config.tv_bound) or (A < 0 and shift < -config.tv_bound))
        main = -rho * A if keep else 0.0
        return main + 1e-3 * gap * gap, main + 2e-3 * gap
    raise AssertionError(name)


def sequence_losses(config: LossConfig, tokens: list[Token], reward: float) -> tuple[list[float], Rows]:
    """L_t, and dL_t/dlogp_s as a matrix."""
    n = len(tokens)
    if config.surrogate not in ("gspo", "gspo_token"):
        pairs = [token_loss(config, token, tokens, reward) for token in tokens]
        return [loss for loss, _ in pairs], [[pairs[t][1] if s == t else 0.0 for s in range(n)] for t in range(n)]
    el = 3e-4 if config.clip_low is None else config.clip_low
    eh = 4e-4 if config.clip_high is None else config.clip_high
    s = math.exp(sum(math.log(token.r) for token in tokens) / n)
    pairs = [clip_pair(s, token.A, el, eh, None) for token in tokens]
    if config.surrogate == "gspo":
        return [loss for loss, _ in pairs], [[slope * s / n] * n for _, slope in pairs]
    return [loss for loss, _ in pairs], [[pairs[t][1] * s if u == t else 0.0 for u in range(n)] for t in range(n)]


def correction(config: LossConfig, tokens: list[Token]) -> list[float]:
    c = config.correction
    logs = [math.log(token.w) for token in tokens]
    level = {
        "token": logs,
        "sequence": [clamp(sum(logs))] * len(logs),
        "geometric": [sum(logs) / len(logs)] * len(logs),
    }[c.level]
    values = [math.exp(x) for x in level]
    low, high = (0.999, 1.001) if c.level == "geometric" else (0.5, 2.0)
    low, high = c.lower if c.lower is not None else low, c.upper if c.upper is not None else high
    if c.kind == "none":
        values = [1.0] * len(values)
    elif c.kind == "truncate":
        values = [min(v, c.upper if c.upper is not None else 2.0) for v in values]
    elif c.kind == "mask":
        values = [v if low <= v <= high else 0.0 for v in values]
    else:
        values = [1.0 if low <= v <= high else 0.0 for v in values]
    return [0.0] * len(values) if c.veto and min(token.w for token in tokens) < c.veto else values


def coefficients(config: LossConfig, mask: list[list[int]]) -> list[float]:
    """Factor of each sequence's tokens in the aggregate."""
    lengths = [sum(row) for row in mask]
    sequences = sum(1 for n in lengths if n)
    if config.aggregation == "token_mean":
        return [1 / sum(lengths)] * len(mask)
    if config.aggregation == "seq_mean_token_mean":
        return [1 / n / sequences if n else 0.0 for n in lengths]
    norm = 1.0
    if config.aggregation == "seq_mean_token_sum_norm":
        norm = config.norm_length if config.norm_length is not None else len(mask[0])
    return [1 / sequences / norm] * len(mask)


def kl_pair(config: LossConfig, logp: float, ref: float, rho: float) -> tuple[float, float]:
    """(weighted estimate, its derivative)."""
    d = clamp(ref - logp, -10, 10)
    value, slope = {
        "k1": (-d, 1.0),
        "k2": (d * d / 2, -d),
        "k3": (math.exp(d) - d - 1, 1 - math.exp(d)),
    }[config.kl_estimator]
    weight = min(rho, 2.0) if config.kl_importance else 1.0
    return weight * value, weight * slope


def reference(config: LossConfig, case: Case) -> tuple[float, Rows]:
    """(loss, gradient) of the whole case."""
    factors = coefficients(config, case.mask)
    loss, gradient = 0.0, [[0.0] * len(row) for row in case.mask]
    for b, row in enumerate(case.mask):
        places = [t for t, m in enumerate(row) if m]
        if not places:
            continue
        tokens = []
        for t in places:
            logp, prox, mu = case.logp[b][t], case.prox[b][t], case.behaviour[b][t]
            anchor = prox if config.anchor == "prox" else mu
            w = math.exp(prox - mu) if config.anchor == "prox" else 1.0
            tokens.append(Token(case.advantages[b][t], logp, mu, math.exp(logp - anchor), w, math.exp(logp - mu)))
        losses, slopes = sequence_losses(config, tokens, case.rewards[b])
        weights = correction(config, tokens)
        for i, t in enumerate(places):
            loss += config.scale * factors[b] * weights[i] * losses[i]
            for j, s in enumerate(places):
                gradient[b][s] += config.scale * factors[b] * weights[i] * slopes[i][j]
            if config.kl_coefficient and config.kl_placement == "loss":
                value, slope = kl_pair(config, tokens[i].logp, case.ref[b][t], tokens[i].rho)
                loss += config.kl_coefficient * factors[b] * value
                gradient[b][t] += config.kl_coefficient * factors[b] * slope
            loss -= config.entropy_coefficient * factors[b] * case.entropy[b][t]
    return loss, gradient
