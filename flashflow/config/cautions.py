"""What a config may say but probably does not mean, or what has a price worth knowing; printed, never refused.

Written as the rules of rules.py are.
"""

import ipaddress
import socket
from collections.abc import Iterator

import psutil

from flashflow.config.kv_cache import pool_tokens, token_bytes
from flashflow.config.rules import Rule, apply_rules
from flashflow.config.scheduling import SCHEDULING_CAUTIONS
from flashflow.config.sections import (
    AlgorithmSection,
    BatchSection,
    CheckpointSection,
    Config,
    EngineSection,
    EvalSection,
    FiltersSection,
    LoraSection,
    ModelSection,
    NetworkSection,
    OptimizerSection,
    PlacementSection,
    ReplaySection,
    RolloutSection,
    RunSection,
    SamplingSection,
    TorchEngineSection,
    filters_dynamically,
)

CONFIDENT_PROBLEMS = 512
"""Held-out problems from which an accuracy is known to about two points (contract 9)."""

WAITING_PER_SLOT = 8
"""Attempts per slot of the engines past which most of an attempt is waiting."""


def cautions(config: Config) -> list[str]:
    return apply_rules(CAUTIONS, {name: getattr(config, name) for name in Config.model_fields})


def short_answers_are_not_favoured(rollout: RolloutSection) -> Iterator[str]:
    if rollout.on_stale == "drop":
        yield (
            "rollout.on_stale: drop favours short answers: long ones expire and are not trained; "
            "wait trains the lengths that were generated"
        )


def what_is_trained_is_what_was_generated(rollout: RolloutSection, replay: ReplaySection) -> Iterator[str]:
    if rollout.failures == "filter":
        yield (
            "rollout.failures: filter favours short answers: those that run into a deadline are tried again; "
            "mask leaves them out without another try"
        )
    if replay.enabled:
        yield (
            f"replay.enabled: true trains samples up to replay.max_replay_staleness {replay.max_replay_staleness} "
            f"versions old, whatever rollout.alpha {rollout.alpha} says of fresh ones"
        )


def filters_change_the_lengths(algorithm: AlgorithmSection, filters: FiltersSection) -> Iterator[str]:
    bounded = filters.mean_lower is not None or filters.mean_upper is not None
    if bounded or filters_dynamically(algorithm, filters):
        yield (
            "filters: replacing groups favours short answers where long ones fail together: lengths trained are not "
            "distributed as lengths generated"
        )


def few_problems_say_little(evaluation: EvalSection) -> Iterator[str]:
    if evaluation.every_steps and evaluation.problems < CONFIDENT_PROBLEMS:
        error = 50 / evaluation.problems**0.5
        yield (
            f"evaluation.problems: {evaluation.problems} know an accuracy of one half to about +-{error:.1f} points; "
            f"{CONFIDENT_PROBLEMS} or more are advised"
        )


def long_answers_exceed_the_micro_batch(batch: BatchSection, sampling: SamplingSection) -> Iterator[str]:
    if batch.micro_batch_tokens < sampling.max_new_tokens:
        yield (
            f"batch.micro_batch_tokens: {batch.micro_batch_tokens} is less than sampling.max_new_tokens "
            f"{sampling.max_new_tokens}: an answer of that length goes alone and takes more memory than the limit says"
        )


def engines_can_be_filled(
    rollout: RolloutSection, batch: BatchSection, engine: EngineSection, placement: PlacementSection
) -> Iterator[str]:
    slots = engine.slots * placement.engine
    groups = int((1 + rollout.alpha) * batch.groups) + rollout.redundant_groups
    admitted = groups * (rollout.group_size + rollout.redundant_members)
    running = rollout.concurrency * placement.env
    if running < min(slots, admitted):
        yield (
            f"rollout.concurrency: {rollout.concurrency} x placement.env {placement.env} runs fewer attempts than "
            f"engine.slots {engine.slots} x placement.engine {placement.engine} could: slots stay idle"
        )
    elif admitted < slots:
        yield (
            f"engine.slots: {engine.slots} x placement.engine {placement.engine} is more than the {admitted} samples "
            f"that batch.groups {batch.groups} and rollout.alpha {rollout.alpha} admit at once: slots stay idle"
        )


def adapters_learn_faster(lora: LoraSection | None, optimizer: OptimizerSection) -> Iterator[str]:
    if lora is not None and "lr" not in optimizer.model_fields_set:
        yield (
            f"optimizer.lr: the default {optimizer.lr} is that of training all weights; the adapters of section lora "
            f"want about ten times as much (docs/lora.md)"
        )


def reduced_precision_is_slow_without_a_gpu(model: ModelSection) -> Iterator[str]:
    if model.dtype == "bfloat16" and model.device == "cpu":
        yield (
            "model.dtype: bfloat16 with model.device cpu is up to 13 times slower than float32 on processors without "
            "AVX-512 or AMX"
        )


def one_process_restarts_nothing(run: RunSection, placement: PlacementSection) -> Iterator[str]:
    if run.runtime != "in_process":
        return
    yield "run.runtime: in_process runs every role in one process, for tests and debugging: roles wait for each other"
    if "max_restarts" in placement.model_fields_set:
        yield (
            f"placement.max_restarts: {placement.max_restarts} has no effect with run.runtime in_process: "
            f"a role that fails ends the run"
        )


def checkpoints_come_before_the_end(checkpoint: CheckpointSection, run: RunSection) -> Iterator[str]:
    if checkpoint.every_steps == 0 or checkpoint.every_steps >= run.steps:
        yield (
            f"checkpoint.every_steps: {checkpoint.every_steps} writes only the last of run.steps {run.steps}: "
            f"a run that dies repeats all its training, and the journal on disk and the ledger in memory grow until "
            f"the end, for only a checkpoint lets them forget"
        )


def the_proxy_is_no_store(rollout: RolloutSection, engine: EngineSection, placement: PlacementSection) -> Iterator[str]:
    if rollout.concurrency * placement.env > WAITING_PER_SLOT * engine.slots * placement.engine:
        yield (
            f"rollout.concurrency: {rollout.concurrency} x placement.env {placement.env} is more than "
            f"{WAITING_PER_SLOT} x engine.slots {engine.slots} x placement.engine {placement.engine}: once that many "
            f"run, requests wait in the proxy for longer than they are answered, and hold memory; "
            f"rollout.turn_deadline_s counts only from when an engine has them"
        )


def the_network_is_private(network: NetworkSection) -> Iterator[str]:
    try:
        public = ipaddress.ip_address(network.interface).is_global
    except ValueError:
        return
    if public:
        yield (
            f"network.interface: {network.interface} is a public address, but torch RPC and collectives unpickle what "
            f"they are sent and do not authenticate; choose an address of a private network (docs/security.md)"
        )


def the_interface_is_this_hosts(network: NetworkSection) -> Iterator[str]:
    found = psutil.net_if_addrs()
    here = [address for addresses in found.values() for address in addresses]
    if network.interface not in ["auto", *found, *(address.address for address in here)]:
        usable = ", ".join(address.address for address in here if address.family == socket.AF_INET)
        yield (
            f"network.interface: {network.interface} is no address and no interface of this host, where a run would "
            f"not start with it; here are {usable}"
        )


def the_cache_may_hold_fewer_than_the_slots(model: ModelSection, engine: EngineSection) -> Iterator[str]:
    if not isinstance(engine, TorchEngineSection):
        return
    each, limit = token_bytes(model), engine.kv_cache_bytes
    if each is None or limit is None or limit >= pool_tokens(engine, engine.slots) * each:
        return
    held, wanted = (limit // each - 1) // (pool_tokens(engine, 1) - 1), pool_tokens(engine, engine.slots) * each
    yield (
        f"engine.kv_cache_bytes: {limit} holds {held} sequences of engine.max_context_tokens "
        f"{engine.max_context_tokens}, while engine.slots {engine.slots} need {wanted}: requests that may become so "
        f"long wait for each other"
    )


CAUTIONS: tuple[Rule, ...] = (
    short_answers_are_not_favoured,
    what_is_trained_is_what_was_generated,
    filters_change_the_lengths,
    few_problems_say_little,
    long_answers_exceed_the_micro_batch,
    engines_can_be_filled,
    adapters_learn_faster,
    reduced_precision_is_slow_without_a_gpu,
    one_process_restarts_nothing,
    checkpoints_come_before_the_end,
    the_proxy_is_no_store,
    the_network_is_private,
    the_interface_is_this_hosts,
    *SCHEDULING_CAUTIONS,
    the_cache_may_hold_fewer_than_the_slots,
)
