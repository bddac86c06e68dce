"""The one place for rules that join sections. Each names both fields and both values.

A rule is a function whose parameter names are the sections it needs; it runs only when all of them are right by
themselves, and yields `path: value ...; remedy`. A broken rule stops a run before it starts; what is allowed but has
a price is a caution (cautions.py).
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from flashflow.algorithms import presets
from flashflow.config.data_files import look_into
from flashflow.config.kv_cache import pool_tokens, token_bytes
from flashflow.config.mistakes import nearest
from flashflow.config.model_files import matrices
from flashflow.config.references import find_module, problem_of
from flashflow.config.scheduling import SCHEDULING_RULES
from flashflow.config.sections import (
    ALL_LINEAR,
    AlgorithmSection,
    BatchSection,
    CriticSection,
    DataSection,
    EngineSection,
    EvalSection,
    FiltersSection,
    HuggingFaceData,
    JsonlData,
    LoraSection,
    ModelSection,
    NetworkSection,
    OptimizerSection,
    OverlongSection,
    ParquetData,
    PlacementSection,
    ReasoningGymData,
    ReplaySection,
    RewardSection,
    RolloutSection,
    RunSection,
    SamplingSection,
    TorchEngineSection,
    TrainerSection,
    filters_dynamically,
    overlong_lengths,
    penalises_overlong,
    trained_staleness,
)
from flashflow.config.simulated import EmpiricalDistribution, SimulatedEngineSection, SimulateSection

Rule = Callable[..., Iterator[str]]

BUILTIN_MODELS = ("builtin:quickstart", "builtin:smollm2-135m")
"""Made by flashflow.builtin."""

HELD_OUT_SHARE = 5
"""One problem in so many of a reasoning-gym set is held out."""


def mistakes(sections: Mapping[str, BaseModel | None]) -> list[str]:
    """What contradicts, among the sections that are right by themselves."""
    return apply_rules(RULES, sections)


def apply_rules(rules: Sequence[Rule], sections: Mapping[str, BaseModel | None]) -> list[str]:
    found: list[str] = []
    for rule in rules:
        needs = inspect.signature(rule).parameters
        if all(name in sections for name in needs):
            found += rule(**{name: sections[name] for name in needs})
    return found


def the_algorithm_is_whole(
    algorithm: AlgorithmSection, rollout: RolloutSection, replay: ReplaySection
) -> Iterator[str]:
    overrides = algorithm.model_extra or {}
    alpha = trained_staleness(rollout, replay)
    found = presets.mistakes(algorithm.preset, overrides, alpha=alpha, group_size=rollout.group_size)
    yield from (f"algorithm.{path}: {message}" for path, message in found)


def a_loss_of_ones_own_exists(algorithm: AlgorithmSection) -> Iterator[str]:
    function = (algorithm.model_extra or {}).get("loss")
    problem = problem_of(function) if isinstance(function, str) else None
    if problem is not None:
        yield f"algorithm.loss: {function!r}: {problem}"


def filters_can_keep_a_group(
    algorithm: AlgorithmSection, filters: FiltersSection, rollout: RolloutSection
) -> Iterator[str]:
    lower, upper = filters.mean_lower, filters.mean_upper
    if lower is not None and upper is not None and lower >= upper:
        yield f"filters.mean_lower: {lower} must be below filters.mean_upper {upper}, or every group is replaced"
    dynamic = filters_dynamically(algorithm, filters)
    if dynamic and rollout.group_size < 2:
        yield (
            f"rollout.group_size: {rollout.group_size} gives no group a signal, so {_dynamic(algorithm, filters)} "
            "replaces all of them; make groups of 2 or more, or set filters.dynamic to false"
        )
    usual = FiltersSection().max_filtered_fraction
    if not dynamic and lower is None and upper is None and filters.max_filtered_fraction != usual:
        yield (
            f"filters.max_filtered_fraction: {filters.max_filtered_fraction} has no effect while filters.dynamic, "
            "filters.mean_lower and filters.mean_upper filter nothing; turn one on, or remove it"
        )


def the_overlong_penalty_acts(
    algorithm: AlgorithmSection, overlong: OverlongSection, sampling: SamplingSection
) -> Iterator[str]:
    if not penalises_overlong(algorithm, overlong):
        for name in ("budget", "cache"):
            if getattr(overlong, name) is not None:
                yield (
                    f"overlong.{name}: {getattr(overlong, name)} has no effect with overlong.penalty false; "
                    "remove one of them"
                )
        return
    budget, cache = overlong_lengths(overlong, sampling)
    path = "overlong.budget" if overlong.budget is not None else "sampling.max_new_tokens"
    if cache > budget:
        yield f"overlong.cache: {cache} is more than {path} {budget}; lower it"
    elif budget - cache >= sampling.max_new_tokens:
        yield (
            f"overlong.budget: {budget} less overlong.cache {cache} is not below sampling.max_new_tokens "
            f"{sampling.max_new_tokens}: no answer would be penalised; lower the budget"
        )


def replay_fits_the_rest(
    algorithm: AlgorithmSection, filters: FiltersSection, replay: ReplaySection, rollout: RolloutSection
) -> Iterator[str]:
    if not replay.enabled:
        usual = ReplaySection()
        for name in ReplaySection.model_fields:
            if getattr(replay, name) != getattr(usual, name):
                yield (
                    f"replay.{name}: {getattr(replay, name)} has no effect with replay.enabled false; "
                    "set that to true, or remove it"
                )
        return
    if filters_dynamically(algorithm, filters):
        yield (
            f"replay.enabled: true together with {_dynamic(algorithm, filters)}: both replace groups without signal; "
            "set one of them to false"
        )
    if rollout.group_size < 2:
        yield (
            f"replay.enabled: true, but with rollout.group_size {rollout.group_size} no group has a signal to be kept "
            "for; make groups of 2 or more, or set it to false"
        )


def _dynamic(algorithm: AlgorithmSection, filters: FiltersSection) -> str:
    """The option that turned dynamic sampling on, for a person."""
    return "filters.dynamic true" + ("" if filters.dynamic else f" (of algorithm.preset {algorithm.preset})")


def answers_fit_the_context(sampling: SamplingSection, engine: EngineSection, evaluation: EvalSection) -> Iterator[str]:
    limit = engine.max_context_tokens
    lengths = {"sampling.max_new_tokens": sampling.max_new_tokens}
    if evaluation.every_steps and evaluation.max_new_tokens is not None:
        lengths["evaluation.max_new_tokens"] = evaluation.max_new_tokens
    for path, length in lengths.items():
        if length >= limit:
            yield (
                f"{path}: {length} leaves no room for a prompt within engine.max_context_tokens {limit}; "
                f"lower the first or raise the second"
            )


def the_warmup_ends(optimizer: OptimizerSection, critic: CriticSection | None, run: RunSection) -> Iterator[str]:
    for name, section in _optimizers(optimizer, critic):
        if section.warmup_steps >= run.steps:
            yield (
                f"{name}.warmup_steps: {section.warmup_steps} does not end within run.steps {run.steps}; "
                f"warm up for fewer steps"
            )


def a_decay_floor_needs_a_decay(optimizer: OptimizerSection, critic: CriticSection | None) -> Iterator[str]:
    for name, section in _optimizers(optimizer, critic):
        if section.decay == "constant" and section.min_lr_fraction > 0:
            yield (
                f"{name}.min_lr_fraction: {section.min_lr_fraction} has no effect with {name}.decay constant; "
                f"choose linear or cosine, or drop it"
            )


def _optimizers(optimizer: OptimizerSection, critic: CriticSection | None) -> Iterator[tuple[str, OptimizerSection]]:
    yield "optimizer", optimizer
    if critic is not None:
        yield "critic", critic


def a_critic_has_a_use(critic: CriticSection | None, algorithm: AlgorithmSection) -> Iterator[str]:
    estimator = presets.estimator_of(algorithm.preset, algorithm.model_extra or {})
    if critic is not None and estimator is not None and estimator != "gae":
        yield (
            f"critic: {critic.kind} has no effect with algorithm.estimator {estimator} (preset {algorithm.preset}); "
            f"remove the section, or set algorithm.estimator to gae"
        )


def the_options_of_the_critic_fit_its_kind(critic: CriticSection | None) -> Iterator[str]:
    if critic is None:
        return
    name = {"value_head": "path", "model": "loss_coefficient"}[critic.kind]
    value = getattr(critic, name)
    if value != CriticSection.model_fields[name].default:
        other = "model" if critic.kind == "value_head" else "value_head"
        yield f"critic.{name}: {value!r} has no effect with critic.kind {critic.kind}; drop it, or use {other}"
    if critic.path is not None and critic.kind == "model":
        yield from _problem_of_model("critic.path", critic.path)


def adapters_train_the_policy_that_samples(lora: LoraSection | None, trainer: TrainerSection) -> Iterator[str]:
    if lora is not None and trainer.kind == "simulated":
        yield "lora: has no effect with trainer.kind simulated, which has no weights; remove the section"
    if lora is not None and lora.dropout != 0:
        yield (
            f"lora.dropout: {lora.dropout} would train another policy than the one that sampled, for engines have no "
            f"dropout; leave it at 0"
        )
    if lora is not None and find_module("peft") is None:
        yield "lora: needs the package peft, which is not installed; pip install 'flashflow[lora]'"


def adapted_layers_exist(lora: LoraSection | None, model: ModelSection) -> Iterator[str]:
    """As far as the files of a local model say; of others the trainer finds out."""
    if lora is None or lora.target_modules == ALL_LINEAR:
        return
    if isinstance(lora.target_modules, str):
        yield f"lora.target_modules: {lora.target_modules!r} must be {ALL_LINEAR}, or a list of names of linear layers"
        return
    if not lora.target_modules:
        yield f"lora.target_modules: [] adapts nothing; name linear layers, or {ALL_LINEAR}"
    layers = matrices(Path(model.path))
    for target in lora.target_modules:
        if layers and not any(f".{layer}".endswith(f".{target}") for layer in layers):
            names = {layer.rpartition(".")[2] for layer in layers}
            yield (
                f"lora.target_modules: {target!r} is no linear layer below the head of model.path {model.path!r}; "
                f"{nearest(target, names)}"
            )


def groups_divide_into_optimizer_steps(batch: BatchSection) -> Iterator[str]:
    if batch.groups % batch.optimizer_steps:
        yield (
            f"batch.optimizer_steps: {batch.optimizer_steps} does not divide batch.groups {batch.groups}; "
            f"choose a divisor"
        )


def the_data_is_there(data: DataSection, evaluation: EvalSection) -> Iterator[str]:
    source = data.source
    match source:
        case JsonlData() | ParquetData():
            for name, path in (("path", source.path), ("eval_path", source.eval_path)):
                if path is not None and not path.is_file():
                    yield f"data.source.{name}: {str(path)!r} is not a file in {Path.cwd()}; name an existing one"
            if source.eval_path is not None and source.eval_path == source.path:
                yield (
                    f"data.source.eval_path: {str(source.eval_path)!r} equals data.source.path; "
                    f"held-out problems must not be trained on"
                )
        case HuggingFaceData():
            if source.eval_split is not None and source.eval_split == source.split:
                yield (
                    f"data.source.eval_split: {source.eval_split!r} equals data.source.split; "
                    f"held-out problems must not be trained on"
                )
        case ReasoningGymData():
            held_out = source.size // HELD_OUT_SHARE
            if evaluation.every_steps and evaluation.problems > held_out:
                yield (
                    f"evaluation.problems: {evaluation.problems} is more than the held-out fifth of data.source.size "
                    f"{source.size}, about {held_out}; raise the size or ask fewer problems"
                )
            if data.prompt_column != "prompt":
                yield (
                    f"data.prompt_column: {data.prompt_column!r} does not exist in data.source.kind reasoning_gym, "
                    f"whose rows have prompt and answer; drop it"
                )


def the_data_package_is_installed(data: DataSection) -> Iterator[str]:
    package = {"reasoning_gym": "reasoning_gym", "parquet": "pyarrow", "datasets": "datasets"}.get(data.source.kind)
    if package is not None and find_module(package) is None:
        yield (
            f"data.source.kind: {data.source.kind} needs the package {package}, which is not installed; "
            f"pip install 'flashflow[envs]'"
        )


def evaluation_has_problems(data: DataSection, evaluation: EvalSection) -> Iterator[str]:
    source = data.source
    missing = {"jsonl": "eval_path", "parquet": "eval_path", "datasets": "eval_split"}.get(source.kind)
    if evaluation.every_steps and missing is not None and getattr(source, missing) is None:
        yield (
            f"evaluation.every_steps: {evaluation.every_steps} needs held-out problems, but data.source.{missing} is "
            f"null; give it, or set evaluation.every_steps to 0"
        )


def the_reward_exists(reward: RewardSection) -> Iterator[str]:
    problem = problem_of(reward.function)
    if problem is not None:
        yield f"reward.function: {reward.function!r}: {problem}"


def the_model_exists(model: ModelSection, trainer: TrainerSection) -> Iterator[str]:
    if trainer.kind == "simulated":
        return
    if not model.path:
        yield f"model.path: missing; {_described(ModelSection, 'path')}"
    elif model.path.startswith("builtin:"):
        if model.path not in BUILTIN_MODELS:
            yield f"model.path: {model.path!r} is no builtin model; valid: {', '.join(BUILTIN_MODELS)}"
    else:
        yield from _problem_of_model("model.path", model.path)


def _described(section: type[BaseModel], field: str) -> str:
    return " ".join((section.model_fields[field].description or "").split())


def _problem_of_model(field: str, path: str) -> Iterator[str]:
    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not Path(path).is_dir():
        yield f"{field}: {path!r} is no folder in {Path.cwd()} and no hub name; name a model folder"


def peers_get_their_time(network: NetworkSection) -> Iterator[str]:
    if network.heartbeat_s >= network.peer_deadline_s:
        yield (
            f"network.heartbeat_s: {network.heartbeat_s} must be less than network.peer_deadline_s "
            f"{network.peer_deadline_s}, or every peer counts as dead; a third of it is usual"
        )
    if network.long_poll_s >= network.call_deadline_s:
        yield (
            f"network.long_poll_s: {network.long_poll_s} must be less than network.call_deadline_s "
            f"{network.call_deadline_s}, or every idle long poll ends as an error; shorten it"
        )


def a_turn_ends_before_its_trajectory(rollout: RolloutSection) -> Iterator[str]:
    if rollout.turn_deadline_s > rollout.trajectory_deadline_s:
        yield (
            f"rollout.turn_deadline_s: {rollout.turn_deadline_s} is more than rollout.trajectory_deadline_s "
            f"{rollout.trajectory_deadline_s}, which would always fire first; lower it"
        )


def samples_come_from_the_whole_distribution(sampling: SamplingSection) -> Iterator[str]:
    if sampling.top_p < 1:
        yield (
            f"sampling.top_p: {sampling.top_p} would record log-probabilities of the truncated distribution, while the "
            f"trainer's are of the whole one at sampling.temperature {sampling.temperature}: w would not be 1 for "
            f"unchanged weights; leave top_p at 1 and lower the temperature instead"
        )


def one_process_has_one_trainer(run: RunSection, placement: PlacementSection) -> Iterator[str]:
    if run.runtime == "in_process" and placement.trainer > 1:
        yield (
            f"placement.trainer: {placement.trainer} ranks need processes of their own, but run.runtime is in_process; "
            f"use one, or run.runtime=processes"
        )


def the_data_files_have_what_is_asked(data: DataSection, evaluation: EvalSection) -> Iterator[str]:
    source, column = data.source, data.prompt_column
    if not isinstance(source, JsonlData | ParquetData) or (source.kind == "parquet" and find_module("pyarrow") is None):
        return
    asked = {"path": 1, "eval_path": evaluation.problems if evaluation.every_steps else 0}
    for name, num_rows in asked.items():
        path: Path | None = getattr(source, name)
        if path is None or not path.is_file():
            continue
        try:
            found = look_into(path, source.kind, max(1, num_rows))
        except (OSError, ValueError) as error:
            yield f"data.source.{name}: {str(path)!r} cannot be read: {error}; name a {source.kind} file"
            continue
        if found.num_rows and column not in found.columns:
            remedy = nearest(column, found.columns) if found.columns else "its first row is empty"
            yield f"data.prompt_column: {column!r} is no column of data.source.{name} {str(path)!r}; {remedy}"
        if found.num_rows < num_rows and name == "path":
            yield f"data.source.path: {str(path)!r} has no rows to train on; name another file"
        elif found.num_rows < num_rows:
            yield (
                f"evaluation.problems: {num_rows} is more than the {found.num_rows} rows of data.source.eval_path "
                f"{str(path)!r}; ask fewer problems, or hold out more"
            )


def the_context_fits_the_model(model: ModelSection, engine: EngineSection) -> Iterator[str]:
    limit = _max_positions(Path(model.path) / "config.json") if model.path else None
    if limit is not None and engine.max_context_tokens > limit:
        yield (
            f"engine.max_context_tokens: {engine.max_context_tokens} is more than max_position_embeddings {limit} of "
            f"model.path {model.path!r}; lower it to {limit} or less"
        )


def the_cache_holds_a_sequence(model: ModelSection, engine: EngineSection) -> Iterator[str]:
    if not isinstance(engine, TorchEngineSection):
        return
    each, limit = token_bytes(model), engine.kv_cache_bytes
    if each is not None and limit is not None and limit < pool_tokens(engine, 1) * each:
        yield (
            f"engine.kv_cache_bytes: {limit} is less than the {pool_tokens(engine, 1) * each} that one sequence of "
            f"engine.max_context_tokens {engine.max_context_tokens} needs with model.path {model.path!r}; "
            f"raise the first or lower the second"
        )


def _max_positions(description: Path) -> int | None:
    """Of the text part, where a model has several; None when a file of this form does not say."""
    try:
        values = json.loads(description.read_bytes())
        limit = values.get("text_config", values)["max_position_embeddings"]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return limit if isinstance(limit, int) else None


def the_torch_engine_has_one_device(engine: EngineSection, placement: PlacementSection) -> Iterator[str]:
    if engine.kind == "torch" and placement.tensor_parallel > 1:
        yield (
            f"placement.tensor_parallel: {placement.tensor_parallel} devices for an engine, but engine.kind torch "
            f"computes on one; set it to 1 and placement.engine to {placement.engine * placement.tensor_parallel}"
        )


def simulated_parts_go_together(engine: EngineSection, trainer: TrainerSection, data: DataSection) -> Iterator[str]:
    kinds = {"engine.kind": engine.kind, "trainer.kind": trainer.kind, "data.source.kind": data.source.kind}
    real = [path for path, kind in kinds.items() if kind != "simulated"]
    if 0 < len(real) < len(kinds):
        (first, *_) = (path for path in kinds if path not in real)
        yield from (
            f"{path}: {kinds[path]} does not go with {first} simulated: there is no model and no text; "
            f"make all three simulated, or none"
            for path in real
        )


def simulated_answers_meet_their_deadline(
    engine: EngineSection, sampling: SamplingSection, rollout: RolloutSection
) -> Iterator[str]:
    if not isinstance(engine, SimulatedEngineSection) or engine.stream_every_s is not None:
        return
    rate = engine.decode_tokens_per_s
    longest_s = sampling.max_new_tokens / rate if rate else 0.0
    if longest_s >= rollout.turn_deadline_s:
        yield (
            f"rollout.turn_deadline_s: {rollout.turn_deadline_s:g} ends the longest answers, sampling.max_new_tokens "
            f"{sampling.max_new_tokens} at engine.decode_tokens_per_s {rate:g} taking {longest_s:.0f} s without a "
            f"sign of life; raise it, or set engine.stream_every_s"
        )


def simulated_distributions_can_be_read(
    engine: EngineSection, data: DataSection, simulate: SimulateSection
) -> Iterator[str]:
    sections = {"engine": engine, "data.source": data.source, "simulate": simulate}
    for section, holder in sections.items():
        for name in type(holder).model_fields:
            found = getattr(holder, name)
            if isinstance(found, EmpiricalDistribution) and (problem := _problem_of_numbers(found.path)):
                yield f"{section}.{name}.path: {str(found.path)!r} {problem}; name a file with one number on each line"


def _problem_of_numbers(path: Path) -> str:
    try:
        numbers = [float(line) for line in path.read_text().split()]
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    if not numbers:
        return "is empty"
    return "holds a number below 0" if min(numbers) < 0 else ""


def only_simulated_environments_are_described(simulate: SimulateSection, trainer: TrainerSection) -> Iterator[str]:
    if trainer.kind == "simulated":
        return
    for name, field in SimulateSection.model_fields.items():
        if getattr(simulate, name) != field.default:
            yield f"simulate.{name}: has no effect with trainer.kind {trainer.kind}; remove it"


RULES: tuple[Rule, ...] = (
    the_algorithm_is_whole,
    a_loss_of_ones_own_exists,
    filters_can_keep_a_group,
    the_overlong_penalty_acts,
    replay_fits_the_rest,
    answers_fit_the_context,
    the_warmup_ends,
    a_decay_floor_needs_a_decay,
    a_critic_has_a_use,
    the_options_of_the_critic_fit_its_kind,
    adapters_train_the_policy_that_samples,
    adapted_layers_exist,
    groups_divide_into_optimizer_steps,
    the_data_is_there,
    the_data_package_is_installed,
    evaluation_has_problems,
    the_reward_exists,
    the_model_exists,
    peers_get_their_time,
    a_turn_ends_before_its_trajectory,
    one_process_has_one_trainer,
    samples_come_from_the_whole_distribution,
    the_data_files_have_what_is_asked,
    the_context_fits_the_model,
    the_cache_holds_a_sequence,
    the_torch_engine_has_one_device,
    simulated_parts_go_together,
    simulated_answers_meet_their_deadline,
    simulated_distributions_can_be_read,
    only_simulated_environments_are_described,
    *SCHEDULING_RULES,
)
