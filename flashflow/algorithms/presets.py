"""The algorithms by name, as data, and how overrides are laid over them. Free of torch.

`resolve` gives the two configs of an algorithm or raises with every mistake; `mistakes` lists them. Paths are relative
to the section `algorithm`: ("clip_low", "..."), ("correction.kind", "...").
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from pydantic import ValidationError

from flashflow.algorithms.catalogue import PRESETS, Algorithm
from flashflow.algorithms.options import ADVANTAGE_OPTIONS, LOSS_OPTIONS, used_options, why_unused
from flashflow.algorithms.settings import (
    GROUP_BASELINES,
    SELF_CORRECTING,
    AdvantageConfig,
    LossConfig,
)
from flashflow.errors import ConfigError

__all__ = ["PRESETS", "Algorithm", "mistakes", "resolve"]

Mistake = tuple[str, str]
S = TypeVar("S", AdvantageConfig, LossConfig)

DYNAMIC_SAMPLING = frozenset({"dapo"})
"""Presets with filters.dynamic. The paper sets no bound to the groups that are replaced; filters.max_filtered_fraction
does, at the nine of ten of the common codebase's ten rounds of generation a batch."""
OVERLONG_PENALTY = frozenset({"dapo"})
"""Presets with overlong.penalty; the paper's budget of 20480 and cache of 4096 become max_new_tokens and its fifth."""


def resolve(preset: str, overrides: Mapping[str, object], *, alpha: float) -> Algorithm:
    """The configs of `preset` with `overrides` laid over it. Raises ConfigError with every mistake.

    At alpha > 0 an algorithm that would take stale samples for fresh ones gets correction truncate at token level
    (cap 2.0) unless a correction is written out, and KL in the loss is weighted by min(rho, 2).
    """
    algorithm, found = _build(preset, dict(overrides), alpha=alpha)
    if found or algorithm is None:
        raise ConfigError([f"algorithm.{path}: {message}" for path, message in found])
    return algorithm


def mistakes(preset: str, overrides: Mapping[str, object], *, alpha: float, group_size: int) -> list[Mistake]:
    """Every mistake as (path in the section `algorithm`, message); empty when `resolve` succeeds and groups are large
    enough for the baseline."""
    algorithm, found = _build(preset, dict(overrides), alpha=alpha)
    if algorithm is not None and group_size < 2 and algorithm[0].estimator in GROUP_BASELINES:
        found.append((
            "estimator",
            f"{algorithm[0].estimator} compares the members of a group, but rollout.group_size = {group_size}: "
            "set rollout.group_size to 2 or more, or estimator to reinforce_pp or gae",
        ))  # fmt: skip
    return found


def estimator_of(preset: str, overrides: Mapping[str, object]) -> object:
    """What `overrides` make of the preset's estimator, right or wrong; None for an unknown preset."""
    return overrides.get("estimator", PRESETS[preset][0].estimator) if preset in PRESETS else None


def _build(preset: str, overrides: dict[str, object], *, alpha: float) -> tuple[Algorithm | None, list[Mistake]]:
    """The algorithm from what is right in `overrides` (None: unknown preset), and what is wrong."""
    if preset not in PRESETS:
        return None, [("preset", f"unknown preset {preset!r}{_nearest(preset, PRESETS)}")]
    found = [(name, _unknown(name)) for name in overrides if name not in ADVANTAGE_OPTIONS and name not in LOSS_OPTIONS]
    advantage_base, loss_base = PRESETS[preset]
    advantage, wrong = _overlay(advantage_base, {n: v for n, v in overrides.items() if n in ADVANTAGE_OPTIONS})
    given = {n: v for n, v in overrides.items() if n in LOSS_OPTIONS}
    loss, wrong_loss = _overlay_loss(advantage, loss_base, given, alpha=alpha)
    found += wrong + wrong_loss
    bad = {path.split(".")[0] for path, _ in found}
    used = used_options(advantage, loss)
    for name in overrides:
        if name not in bad and name not in used and not _says_k1_in_reward(name, overrides, loss):
            found.append((name, f"{name} has no effect: {why_unused(name, advantage, loss)}"))
    if alpha > 0 and "correction" not in bad and not loss.handles_off_policy and not _says_none(overrides):
        found.append(_inert(loss, alpha))
    return (advantage, loss), found


def _overlay_loss(
    advantage: AdvantageConfig, base: LossConfig, given: dict[str, object], *, alpha: float
) -> tuple[LossConfig, list[Mistake]]:
    """`base` with what is given and what follows from the estimator, the surrogate and alpha."""
    correction = given.pop("correction", {})
    scale = 1 / (1 + advantage.opmd_tau) if advantage.estimator == "opmd" else 1.0
    base = base.model_copy(update={"scale": scale})
    given = _own_clip_defaults(base, given)
    loss, found = _overlay(base, given)
    if alpha > 0:
        loss = loss.model_copy(update={"kl_importance": _kl_importance(given, loss)})
    fields = {"kind": correction} if isinstance(correction, str) else correction
    if alpha > 0 and isinstance(fields, Mapping) and "kind" not in fields and not loss.handles_off_policy:
        self_correcting = loss.loss is None and loss.surrogate in SELF_CORRECTING
        fields = dict(fields) if self_correcting else {"kind": "truncate", **fields}
    if not fields:
        return loss, found
    corrected, wrong = _overlay(loss, {"correction": fields})
    return corrected, found + wrong


def _own_clip_defaults(base: LossConfig, given: dict[str, object]) -> dict[str, object]:
    """A surrogate other than the preset's starts from its own clip range, not from the preset's."""
    if given.get("surrogate", base.surrogate) == base.surrogate:
        return given
    return {"clip_low": None, "clip_high": None, **given}


def _kl_importance(given: Mapping[str, object], loss: LossConfig) -> bool:
    return loss.kl_importance if "kl_importance" in given else loss.kl_coefficient > 0 and loss.kl_placement == "loss"


def _overlay(base: S, given: Mapping[str, object]) -> tuple[S, list[Mistake]]:
    """`base` with the values of `given` that are valid, and a mistake for each that is not."""
    found: list[Mistake] = []
    values = dict(given)
    while True:
        try:
            return type(base).model_validate(base.model_dump() | values), found
        except ValidationError as error:
            wrong = _wrong_values(error, list(values))
            found += wrong
            bad = {path.split(".")[0] for path, _ in wrong}
            values = {name: value for name, value in values.items() if name not in bad}


def _wrong_values(error: ValidationError, names: list[str]) -> list[Mistake]:
    found: list[Mistake] = []
    for detail in error.errors():
        # An error of the whole model has no place: it comes from the given values it speaks of.
        path = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        if path:
            shown = "" if isinstance(detail["input"], Mapping) else f" (got {detail['input']!r})"
            found.append((path, message + shown))
        else:
            spoken = sorted((name for name in names if name in message), key=message.index) or names
            found.append((spoken[0], message))
    return found


def _inert(loss: LossConfig, alpha: float) -> Mistake:
    """Off-policy handling that handles nothing. Only weighted_topr without its weighted part gets here: all others
    that do not weight by themselves have been given a correction."""
    return "weight_negative", (
        f"samples may be {alpha} versions old (rollout.alpha, replay.max_replay_staleness), but with weight_negative = "
        f"{loss.weight_negative} surrogate {loss.surrogate} takes them for fresh ones: raise weight_negative, or write "
        "`correction: none` to accept it"
    )


def _says_none(overrides: Mapping[str, object]) -> bool:
    """The correction was written out as none."""
    value = overrides.get("correction")
    return value == "none" or (isinstance(value, Mapping) and value.get("kind") == "none")


def _says_k1_in_reward(name: str, overrides: Mapping[str, object], loss: LossConfig) -> bool:
    """`kl_estimator: k1` says what placement reward does anyway."""
    return (
        name == "kl_estimator" and overrides[name] == "k1" and loss.kl_placement == "reward" and loss.kl_coefficient > 0
    )


def _unknown(name: str) -> str:
    if name == "scale":
        return "scale follows from opmd_tau: set opmd_tau, or remove it"
    return f"unknown option{_nearest(name, (*ADVANTAGE_OPTIONS, *LOSS_OPTIONS, 'preset'))}"


def _nearest(name: str, valid: Iterable[str]) -> str:
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else f"; valid are {', '.join(names)}"
