"""Rules and cautions of the rollout section's scheduling; written as those of rules.py, which applies them.

What ends attempts before they end by themselves ends the long ones: trained answers are shorter than generated ones
(contract 2), which a caution says of every such option.
"""

from collections.abc import Iterator

from flashflow.config.sections import BatchSection, EngineSection, PlacementSection, RolloutSection


def a_synchronous_schedule_runs_nothing_ahead(rollout: RolloutSection) -> Iterator[str]:
    if rollout.schedule != "async" and rollout.alpha > 0:
        yield (
            f"rollout.schedule: {rollout.schedule} is synchronous, but rollout.alpha is {rollout.alpha:g}; "
            "set alpha to 0, or the schedule to async"
        )


def a_whole_batch_leaves_nobody_out(
    rollout: RolloutSection, batch: BatchSection, placement: PlacementSection
) -> Iterator[str]:
    if rollout.schedule != "sync_naive":
        return
    for name in ("redundant_groups", "redundant_members", "straggler_deadline_s"):
        value = getattr(rollout, name)
        if value:
            yield (
                f"rollout.{name}: {value:g} contradicts rollout.schedule sync_naive, which scores nothing before all "
                "is generated; remove it, or choose sync_queue"
            )
    samples, running = batch.groups * rollout.group_size, rollout.concurrency * placement.env
    if running < samples:
        yield (
            f"rollout.concurrency: {rollout.concurrency} x placement.env {placement.env} is less than the {samples} "
            f"samples of a batch, which rollout.schedule sync_naive keeps running until all are generated; raise it to "
            f"{-(-samples // placement.env)}"
        )


def a_block_can_begin_together(rollout: RolloutSection, placement: PlacementSection) -> Iterator[str]:
    members, running = rollout.group_size + rollout.redundant_members, rollout.concurrency * placement.env
    if not rollout.replicate_prompts and running < members:
        yield (
            f"rollout.replicate_prompts: false starts the {members} attempts at a task together, but "
            f"rollout.concurrency {rollout.concurrency} x placement.env {placement.env} runs fewer; raise it"
        )


def lost_groups_have_a_limit(rollout: RolloutSection) -> Iterator[str]:
    if rollout.max_failed_fraction == 1:
        yield (
            f"rollout.max_failed_fraction: 1 with rollout.failures {rollout.failures} would replace failing groups for "
            "ever; set it below 1"
        )


def a_quorum_is_part_of_the_group(rollout: RolloutSection) -> Iterator[str]:
    quorum = rollout.min_members
    if quorum is None:
        return
    if quorum > rollout.group_size:
        yield (
            f"rollout.min_members: {quorum} is more than rollout.group_size {rollout.group_size}, which is enough by "
            "itself; lower it"
        )
    elif quorum < rollout.group_size and rollout.straggler_deadline_s is None:
        yield (
            f"rollout.min_members: {quorum} has no effect with rollout.straggler_deadline_s null, at which it counts; "
            "set a deadline, or remove it"
        )


def short_answers_win_races(rollout: RolloutSection) -> Iterator[str]:
    if rollout.redundant_groups:
        yield (
            f"rollout.redundant_groups: {rollout.redundant_groups} favours short answers: groups that finish late are "
            "aborted when no batch may take them; 0 trains the lengths that were generated"
        )
    if rollout.redundant_members:
        yield (
            f"rollout.redundant_members: {rollout.redundant_members} favours short answers: the last of each group are "
            "aborted; 0 trains the lengths that were generated"
        )
    if rollout.straggler_deadline_s is not None:
        yield (
            f"rollout.straggler_deadline_s: {rollout.straggler_deadline_s:g} favours short answers once it fires: what "
            "is not finished is aborted; see ledger_expired in the metrics"
        )


SCHEDULING_RULES = (
    a_synchronous_schedule_runs_nothing_ahead,
    a_whole_batch_leaves_nobody_out,
    a_block_can_begin_together,
    lost_groups_have_a_limit,
    a_quorum_is_part_of_the_group,
)


def whole_groups_wait_for_one_engine(
    rollout: RolloutSection, engine: EngineSection, placement: PlacementSection
) -> Iterator[str]:
    members = rollout.group_size + rollout.redundant_members
    if not rollout.replicate_prompts and placement.engine > 1:
        yield (
            f"rollout.replicate_prompts: false keeps each group on one of placement.engine {placement.engine} engines: "
            "long answers meet there while others idle; true spreads them"
        )
    if not rollout.replicate_prompts and members > engine.slots:
        yield (
            f"rollout.replicate_prompts: false sends {members} attempts at once to an engine of engine.slots "
            f"{engine.slots}: the last of them wait in it"
        )


SCHEDULING_CAUTIONS = (short_answers_win_races, whole_groups_wait_for_one_engine)
