"""buffer (SampleBuffer): owns the ledger, the dataset's cursor, admission, groups and batches.

    dataset -> BUFFER --Lease--> ENV        CONTROLLER --NextBatch k--> BUFFER --Manifest k--> CONTROLLER
                 ^----Commit---- ENV           TRAINER --FetchRows----> BUFFER --Rows--------> TRAINER

waits for: commits; versions to be served; a checkpoint, to forget.
unblocked by: envs; the controller. Its long polls end after network.long_poll_s with a reason.
never: answers before the journal has it; hands a sample out twice, or one that is too old; keeps a payload in memory.
"""

import asyncio
from pathlib import Path

from flashflow.algorithms.settings import NO_FILTERS, FilterConfig, ReplayConfig
from flashflow.clock import Clock
from flashflow.config.sections import (
    BatchSection,
    EvalSection,
    JournalSection,
    NetworkSection,
    RolloutSection,
    RunSection,
)
from flashflow.data.base import TaskStream
from flashflow.errors import ContractError
from flashflow.journal import Offload, OpenJournal, open_journal
from flashflow.ledger import Rules
from flashflow.messages import (
    Ack,
    AcquireLease,
    AttemptFailed,
    AwaitRevoked,
    AwaitScoring,
    Checkpointed,
    Commit,
    CommitReply,
    EnginesPaused,
    Evaluate,
    FetchRows,
    Finish,
    JournalStatus,
    JournalStatusRequest,
    Message,
    NextBatch,
    ServingVersion,
)
from flashflow.roles.bookkeeper import Bookkeeper
from flashflow.roles.handover import Handover
from flashflow.roles.leasing import Leasing
from flashflow.roles.membership import Membership
from flashflow.transport.channel import Emit, Peer


class Buffer:
    def __init__(
        self,
        *,
        run: RunSection,
        rollout: RolloutSection,
        batch: BatchSection,
        journal: JournalSection,
        evaluation: EvalSection,
        network: NetworkSection,
        tasks: TaskStream,
        folder: Path,
        clock: Clock,
        filters: FilterConfig = NO_FILTERS,
        replay: ReplayConfig | None = None,
        reward_name: str = "",
        offload: Offload = asyncio.to_thread,
        open_journal: OpenJournal = open_journal,
    ) -> None:
        """Opens the journal in `folder`, and blocks while it is read; raises what open_journal raises.

        `reward_name` stands in the message of a run that the filters stop. `offload` runs what blocks on the disk later
        on; on virtual time it must be journal.in_place. `open_journal` may keep everything in memory.
        """
        rules = Rules(
            group_size=rollout.group_size,
            batch_groups=batch.groups,
            alpha=rollout.alpha,
            on_stale=rollout.on_stale,
            max_attempts=rollout.max_attempts,
            redundant_groups=rollout.redundant_groups,
            redundant_members=rollout.redundant_members,
            min_members=rollout.min_members,
            failures=rollout.failures,
            filters=filters,
            replay=replay,
        )
        self._journal, self._ledger = open_journal(folder, journal, rules, run=run.name, seed=run.seed, offload=offload)
        self._fsync_s = journal.fsync_s
        self._clock = clock
        self._members = Membership()
        self._books = Bookkeeper(
            self._ledger,
            self._journal,
            tasks,
            reward_name=reward_name,
            max_failed_fraction=rollout.max_failed_fraction,
        )
        self._leasing = Leasing(
            books=self._books,
            members=self._members,
            tasks=tasks,
            rollout=rollout,
            evaluation=evaluation,
            network=network,
            clock=clock,
        )
        self._handover = Handover(
            books=self._books, members=self._members, rollout=rollout, network=network, seed=run.seed, clock=clock
        )
        self._tending: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """From now on the journal is synced every journal.fsync_s, and deadlines are kept."""
        work = (self._tend(), self._leasing.stragglers.run())
        self._tending = [asyncio.create_task(coroutine) for coroutine in work]

    async def close(self) -> None:
        """Syncs the journal and gives it up. Calls that still wait are not answered. Raises what ended the tending."""
        try:
            for task in self._tending:
                task.cancel()
            await asyncio.gather(*self._tending, return_exceptions=True)
            self._raise_if_not_tended()
        finally:
            await self._journal.offload(self._journal.close)

    async def handle(self, message: Message, peer: Peer, emit: Emit) -> Message:
        """Serves every call of topology.EDGES whose callee is the buffer.

        Raises BudgetError when failures stop the run, DeadlineError for an evaluation that took too long,
        ContractError for superseded callers of the gang and calls out of turn.
        """
        self._raise_if_not_tended()
        if self._members.see(peer):
            self._leasing.take_back_orphans()
        match message:
            case AcquireLease():
                return await self._leasing.acquire(peer)
            case AwaitRevoked():
                return await self._leasing.revoked(peer, message.late)
            case AwaitScoring():
                return await self._leasing.may_score(message.sample, message.lease_epoch)
            case Commit():
                return CommitReply(status=self._leasing.commit(message))
            case AttemptFailed():
                return CommitReply(status=self._leasing.attempt_failed(message))
            case _:
                self._members.check(peer)
                return await self._handle_gang(message, peer)

    def peer_lost(self, peer: Peer) -> None:
        """Its leases go to others at once."""
        self._members.lose(peer)
        self._leasing.take_back_orphans()

    def describe(self) -> str:
        """For the watchdog: who holds which lease for how long, and why nothing moves."""
        ledger = self._ledger
        counts = ", ".join(f"{count} {state}" for state, count in ledger.counts().items() if count)
        lines = [
            f"buffer: {ledger.submitted} samples submitted ({counts or 'none'}); "
            f"batch {ledger.last_manifest} handed out, version {ledger.served} served",
            f"  leases: {self._leasing.idle_reason()}",
            f"  batch: {self._handover.waiting_for or 'none is asked for'}",
        ]
        return "\n".join(lines + self._leasing.describe())

    async def _handle_gang(self, message: Message, peer: Peer) -> Message:
        match message:
            case NextBatch():
                return await self._handover.next_batch(message.step, peer)
            case FetchRows():
                return await self._handover.fetch(message)
            case ServingVersion():
                self._leasing.stragglers.pause(False)
                return self._handover.serving(message.version, peer)
            case EnginesPaused():
                self._leasing.stragglers.pause(message.paused)
                return Ack()
            case Checkpointed():
                return await self._handover.checkpointed(message.step)
            case Evaluate():
                return await self._leasing.evaluate(message.version, peer)
            case JournalStatusRequest():
                counts = {state.value: count for state, count in self._ledger.counts().items()}
                return JournalStatus(
                    last_manifest=self._ledger.last_manifest, counts=counts, tokens_wasted=self._ledger.tokens_wasted
                )
            case Finish():
                self._leasing.finish()
                self._handover.finish()
                await self._journal.sync()
                return Ack()
            case _:
                raise ContractError(f"{peer} sent {type(message).__name__}, which the buffer does not serve")

    async def _tend(self) -> None:
        while True:
            await self._clock.sleep(self._fsync_s)
            await self._journal.sync()
            self._leasing.take_back_forgotten()

    def _raise_if_not_tended(self) -> None:
        """The failure that ended a background task, if one did."""
        for task in self._tending:
            if task.done() and not task.cancelled():
                task.result()
