"""Every surrogate loss as one row of a table; a preset names a row.

A row maps Terms to losses per token [B,T], minimised, and to which tokens a clip cuts off (None: nothing clips).
sg is stop-gradient. Values outside the mask do not matter: the aggregation drops them.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from flashflow.algorithms.ratios import Terms, sequence_log_ratio
from flashflow.errors import ConfigError, ContractError

Row = tuple[Tensor, Tensor | None]
OwnLoss = Callable[[Terms], Tensor]
"""A loss of one's own: Terms -> losses per token [B,T]. Masking, correction and aggregation are done around it."""

DPPO_QUADRATIC = 1e-3


def clip_bounds(terms: Terms) -> tuple[float | None, float | None]:
    """(1 - el, 1 + eh)."""
    low, high = terms.config.clip_bounds
    return None if low is None else 1 - low, None if high is None else 1 + high


def clipped(terms: Terms, ratio: Tensor, dual: float | None = None) -> tuple[Tensor, Tensor]:
    """max(-ratio A, -clip(ratio, 1 - el, 1 + eh) A); with dual clip c, where A < 0: min of that and -c A."""
    advantages = terms.advantages
    low, high = clip_bounds(terms)
    plain, bounded = -ratio * advantages, -ratio.clamp(low, high) * advantages
    loss, cut = torch.maximum(plain, bounded), bounded > plain
    if dual is not None:
        ceiling = -dual * advantages
        loss, cut = (
            torch.where(advantages < 0, torch.minimum(loss, ceiling), loss),
            cut | ((advantages < 0) & (loss > ceiling)),
        )
    return loss, cut


def clip(terms: Terms) -> Row:
    """PPO (1707.06347) eq. 7; dual clip 1912.09729 eq. 5."""
    return clipped(terms, terms.r, terms.config.dual_clip)


def decoupled(terms: Terms) -> Row:
    """sg(min(w, bound)) times clip-loss(r): 2110.00641 and AReaL (2505.24298)."""
    loss, cut = clipped(terms, terms.r, terms.config.dual_clip)
    return terms.w.clamp(max=terms.config.w_bound) * loss, cut


def weighted_reinforce(terms: Terms, weight: Tensor) -> Tensor:
    """-sg(weight) A logp."""
    return -weight.detach() * terms.advantages * terms.logp


def outside(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """Where clamp(low, high) changes the ratio."""
    return ratio != ratio.clamp(low, high)


def tis(terms: Terms) -> Row:
    """-sg(clip(rho, lo, hi)) A logp: ROLL Flash (2510.11345)."""
    rho, low, high = terms.rho.detach(), terms.config.rho_low, terms.config.rho_high
    return weighted_reinforce(terms, rho.clamp(low, high)), outside(rho, low, high)


def topr(terms: Terms) -> Row:
    """R > 0: -A logp; else -sg(clip(rho, lo, hi)) A logp, rho over the trajectory or per token: 2503.14286."""
    return _topr(terms, 1.0, 1.0)


def weighted_topr(terms: Terms) -> Row:
    """topr with a factor on each part."""
    return _topr(terms, terms.config.weight_positive, terms.config.weight_negative)


def _topr(terms: Terms, on_positive: float, on_rest: float) -> Row:
    if terms.rewards is None:
        raise ContractError(f"surrogate {terms.config.surrogate} needs rewards [B], the raw task rewards: pass them")
    positive = (terms.rewards > 0).unsqueeze(1)
    low, high = terms.config.rho_low, terms.config.rho_high
    rho = (terms.rho if terms.config.level == "token" else terms.over_sequence(terms.log_rho)).detach()
    weight = torch.where(positive, on_positive, on_rest * rho.clamp(low, high))
    return weighted_reinforce(terms, weight), ~positive & outside(rho, low, high)


def cispo(terms: Terms) -> Row:
    """-sg(clip(r, 1 - el if set, 1 + eh)) A logp: MiniMax-M1 (2506.13585) eq. 4 and 5."""
    ratio, (low, high) = terms.r.detach(), clip_bounds(terms)
    return weighted_reinforce(terms, ratio.clamp(low, high)), outside(ratio, low, high)


def gspo(terms: Terms) -> Row:
    """clip-loss of s = exp(mean_t log r), gradient through s: GSPO (2507.18071) eq. 5 and 7."""
    return clipped(terms, sequence_log_ratio(terms.log_r, terms.mask, mean=True).exp())


def gspo_token(terms: Terms) -> Row:
    """clip-loss of sg(s) exp(logp - sg(logp)): the value of gspo, with a gradient of each token's own."""
    s = sequence_log_ratio(terms.log_r, terms.mask, mean=True).exp().detach()
    return clipped(terms, s * (terms.logp - terms.logp.detach()).exp())


def reinforce(terms: Terms) -> Row:
    """-A logp."""
    return -terms.advantages * terms.logp, None


def kimi(terms: Terms) -> Row:
    """-A logp + tau/2 (logp - behaviour)^2: Kimi k1.5 (2501.12599) section 2.3.2."""
    return -terms.advantages * terms.logp + terms.config.kimi_tau / 2 * terms.log_rho.square(), None


def dppo_tv(terms: Terms) -> Row:
    """-keep rho A + 1e-3 (log rho)^2; keep = 0 where A > 0 and pi - mu > d, or A < 0 and pi - mu < -d: 2602.04879."""
    shift = terms.logp.detach().exp() - terms.behaviour.exp()
    bound, advantages = terms.config.tv_bound, terms.advantages
    cut = ((advantages > 0) & (shift > bound)) | ((advantages < 0) & (shift < -bound))
    kept = torch.where(cut, 0.0, -terms.rho * advantages)
    return kept + DPPO_QUADRATIC * terms.log_rho.square(), cut


SURROGATES: dict[str, Callable[[Terms], Row]] = {
    row.__name__: row
    for row in (
        clip, decoupled, tis, topr, weighted_topr, cispo, gspo, gspo_token, reinforce, kimi, dppo_tv,
    )
}  # fmt: skip


def surrogate_loss(terms: Terms) -> Row:
    """Losses per token [B,T] (or [B,1], one for the sequence) of config.loss, else of config.surrogate."""
    if terms.config.loss is None:
        return SURROGATES[terms.config.surrogate](terms)
    losses = own_loss(terms.config.loss)(terms)
    if losses.shape != terms.mask.shape:
        raise ContractError(
            f"algorithm.loss {terms.config.loss} returned shape {list(losses.shape)}, expected losses per token "
            f"{list(terms.mask.shape)}"
        )
    return losses, None


@lru_cache
def own_loss(path: str) -> OwnLoss:
    """Imports `module:function` or `file.py:function`. Raises ConfigError when there is no such thing."""
    source, _, name = path.rpartition(":")
    try:
        function = getattr(_module(source), name)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(
            [f"algorithm.loss: cannot import {path}: {error}; check the module's name and path"]
        ) from error
    if not callable(function):
        raise ConfigError([f"algorithm.loss: {path} is no function: name one that maps Terms to losses [B,T]"])
    loss: OwnLoss = function
    return loss


def _module(source: str) -> ModuleType:
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    spec = importlib.util.spec_from_file_location(f"flashflow_loss_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
