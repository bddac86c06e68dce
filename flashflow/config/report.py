"""What `flashflow check` prints of a config: the numbers that follow from it, and the schema of all configs."""

from typing import Any, NamedTuple

from flashflow.config.kv_cache import pool_tokens, token_bytes
from flashflow.config.sections import Config, OptimizerSection


class Derived(NamedTuple):
    """One number that follows from the config."""

    name: str
    value: str
    meaning: str


def derived_numbers(config: Config) -> list[Derived]:
    samples = config.samples_per_batch
    tokens = samples * config.engine.max_context_tokens
    rollout, batch = config.rollout, config.batch
    slots = config.engine.slots * config.placement.engine
    return [
        Derived("samples per batch", f"{samples}", f"batch.groups {batch.groups} x group_size {rollout.group_size}"),
        Derived("max staleness", f"{config.max_staleness}", f"ceil(rollout.alpha {rollout.alpha:g}), in versions"),
        Derived(
            "max groups in flight",
            f"{config.max_groups_in_flight}",
            f"floor((1 + {rollout.alpha:g}) x {batch.groups})"
            + (f" + redundant_groups {rollout.redundant_groups}" if rollout.redundant_groups else "")
            + ": waiting, running and training",
        ),
        Derived(
            "sampled tokens per batch",
            f"<= {samples * config.sampling.max_new_tokens:,}",
            f"{samples} x sampling.max_new_tokens {config.sampling.max_new_tokens}, for one turn each",
        ),
        Derived("tokens per batch", f"<= {tokens:,}", f"{samples} x engine.max_context_tokens, prompts included"),
        Derived(
            "micro-batches per batch",
            f"<= {_micro_batches(config)}",
            f"of batch.micro_batch_tokens {batch.micro_batch_tokens:,} padded tokens",
        ),
        Derived(
            "optimizer steps per batch",
            f"{batch.optimizer_steps * batch.epochs}",
            f"batch.optimizer_steps {batch.optimizer_steps} x batch.epochs {batch.epochs}",
        ),
        Derived("engine slots", f"{slots}", f"slots {config.engine.slots} x {config.placement.engine} engine(s)"),
        *_engine_cache(config),
        Derived("samples of the run", f"{samples * config.run.steps:,}", f"in run.steps {config.run.steps}"),
        Derived("learning rate", _schedule(config.optimizer, config.run.steps), "warm-up, then decay"),
        Derived(
            "checkpoints", _every(config.checkpoint.every_steps, "only at the end"), f"keeps {config.checkpoint.keep}"
        ),
        Derived(
            "evaluations",
            _every(config.evaluation.every_steps, "none"),
            f"{config.evaluation.problems} problems, greedy",
        ),
        Derived("run folder", str(config.run_folder), "run.folder / run.name"),
    ]


def _engine_cache(config: Config) -> list[Derived]:
    engine, each = config.engine, token_bytes(config.model)
    if engine.kind != "torch":
        return []
    tokens = pool_tokens(engine, engine.slots)
    wanted = f"{tokens:,} tokens" if each is None else f"{tokens * each / 2**20:,.1f} MiB"
    value, meaning = wanted, f"slots {engine.slots} x max_context_tokens {engine.max_context_tokens}, per engine"
    if engine.kv_cache_bytes is not None:
        value = f"<= {engine.kv_cache_bytes / 2**20:,.1f} MiB"
        meaning = f"engine.kv_cache_bytes; {meaning.removesuffix(', per engine')} need {wanted}"
    return [Derived("engine cache", value, meaning)]


def schema() -> dict[str, Any]:
    """JSON schema of the config file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def _micro_batches(config: Config) -> int:
    """When every sequence is as long as the context allows; in all optimizer steps together."""
    batch = config.batch
    per_pass = max(1, batch.micro_batch_tokens // config.engine.max_context_tokens)
    per_step = -(-(config.samples_per_batch // batch.optimizer_steps) // per_pass)
    return per_step * batch.optimizer_steps * batch.epochs


def _schedule(optimizer: OptimizerSection, steps: int) -> str:
    warmup = f"0 -> {optimizer.lr:g} in {optimizer.warmup_steps} steps, then " if optimizer.warmup_steps else ""
    if optimizer.decay == "constant":
        return f"{warmup}{optimizer.lr:g} constant"
    last = optimizer.lr * optimizer.min_lr_fraction
    return f"{warmup}{optimizer.lr:g} -> {last:g} {optimizer.decay} by step {steps}"


def _every(steps: int, never: str) -> str:
    return f"every {steps} steps" if steps else never
