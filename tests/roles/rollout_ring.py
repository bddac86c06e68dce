"""Buffer, envs and proxy as they are, between engines, a reward and a gang that only take time; on virtual time."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from flashflow.algorithms.settings import NO_FILTERS
from flashflow.clock import LoopClock
from flashflow.config.sections import (
    BatchSection,
    EvalSection,
    JournalSection,
    NetworkSection,
    RolloutSection,
    RunSection,
    SamplingSection,
)
from flashflow.errors import ContractError, NotServing, TransportError
from flashflow.journal import in_place
from flashflow.ledger import Ledger
from flashflow.messages import (
    Abort,
    Ack,
    BatchReply,
    EnginesPaused,
    EngineStatus,
    EngineStatusRequest,
    Finish,
    Generate,
    GenerateReply,
    NextBatch,
    Score,
    ScoreReply,
    Serving,
    ServingVersion,
    Update,
)
from flashflow.records import SampleId, SharedWeights
from flashflow.roles.buffer import Buffer
from flashflow.roles.env import EnvRole, PromptCodec
from flashflow.roles.proxy import ProxyRole
from flashflow.simulate.clock import run_virtual
from flashflow.transport.channel import Peer
from flashflow.transport.in_process import InProcessNetwork
from tests.roles.buffer_fleet import Tasks

CHUNK = 10
"""Tokens between two looks of an engine at its weights and at aborts."""
FOREVER_S = 1e7

CODEC = PromptCodec(
    encode=lambda task: [1, 2, 3],
    decode=lambda ids: "",
    prompt_text=lambda task: str(task.row["prompt"]),
    stop_ids=[0],
)


class TimedEngine:
    """Decodes each of its slots at the same speed; a request's length follows from its sampling key."""

    def __init__(self, slots: int, length_of: Callable[[SampleId], int], token_s: float) -> None:
        self.version = -1
        self.free = asyncio.Semaphore(slots)
        self.slots = slots
        self.length_of = length_of
        self.token_s = token_s
        self.aborts: dict[str, asyncio.Event] = {}
        self.sampled = 0
        self.ended: list[tuple[float, SampleId]] = []
        """Requests answered whole, and when."""
        self.groups: set[int] = set()
        """Of which it decoded something."""

    async def handle(self, message, peer, emit):
        match message:
            case Generate():
                return await self._generate(message)
            case Abort():
                for name in self.aborts.keys() & set(message.requests):
                    self.aborts[name].set()
                return Ack()
            case Update():
                self.version = message.weights.version
                return Serving(version=self.version, engines=["engine"])
            case EngineStatusRequest():
                return EngineStatus(
                    version=self.version,
                    slots=self.slots,
                    running=0,
                    waiting=0,
                    tokens_generated=self.sampled,
                    exact=True,
                    packages={},
                )
        raise ContractError(f"unexpected {message}")

    async def _generate(self, request):
        if self.version < request.min_version:
            raise NotServing(f"version {self.version} is served")
        aborted = self.aborts[request.request] = asyncio.Event()
        sample = SampleId(request.key.group, request.key.member, request.key.retry)
        length = self.length_of(sample)
        self.groups.add(sample.group)
        versions: list[int] = []
        try:
            async with self.free:
                while len(versions) < length and not aborted.is_set():
                    tokens = min(CHUNK, length - len(versions))
                    try:
                        async with asyncio.timeout(tokens * self.token_s):
                            await aborted.wait()
                    except TimeoutError:
                        versions += [self.version] * tokens
        finally:
            del self.aborts[request.request]
            self.sampled += len(versions)
        if not aborted.is_set():
            self.ended.append((asyncio.get_running_loop().time(), sample))
        return GenerateReply(
            token_ids=np.ones(len(versions), np.int32),
            logprobs=np.full(len(versions), -1.0, np.float32),
            versions=np.array(versions, np.int32),
            finish_reason="aborted" if aborted.is_set() else "stop",
        )


class TimedReward:
    """Takes as long as `fate_of` says; crashes at None."""

    def __init__(self, fate_of: Callable[[Score], float | None], reward_of: Callable[[SampleId], float]) -> None:
        self.fate_of = fate_of
        self.reward_of = reward_of
        self.started: list[tuple[float, SampleId]] = []

    async def handle(self, message, peer, emit):
        self.started.append((asyncio.get_running_loop().time(), message.sample))
        seconds = self.fate_of(message)
        if seconds is None:
            raise TransportError("the game crashed")
        await asyncio.sleep(seconds)
        return ScoreReply(reward=self.reward_of(message.sample), components={})


def ignore_loss(peer):
    pass


@dataclass
class Played:
    """What a run left behind."""

    manifests: list = field(default_factory=list)
    stats: dict = field(default_factory=dict)
    taken_at: list[float] = field(default_factory=list)
    ledger: Ledger | None = None
    engines: list[TimedEngine] = field(default_factory=list)
    reward: TimedReward | None = None
    leftovers: Counter = field(default_factory=Counter)
    """What stayed in the maps of the roles after the end, by map."""
    finished: bool = False
    """The data ended."""

    @property
    def trained(self) -> list[SampleId]:
        return [row.sample for manifest in self.manifests for row in manifest.rows]


def lengths(seed: int, longest: int = 200) -> Callable[[SampleId], int]:
    """Heavy-tailed, from the sample's own key."""

    def length_of(sample: SampleId) -> int:
        return min(longest, int(Random(f"{seed}/{sample}").paretovariate(1.2) * 5))

    return length_of


def play(
    folder,
    *,
    steps=5,
    groups=2,
    group_size=2,
    alpha=1.0,
    num_engines=2,
    slots=8,
    num_envs=2,
    concurrency=16,
    train_s=3.0,
    token_s=0.1,
    length_of=None,
    fate_of=lambda score: 0.5,
    reward_of=lambda sample: 1.0,
    tasks=None,
    filters=NO_FILTERS,
    max_new_tokens=1000,
    long_poll_s=5.0,
    within_s=None,
    **rollout,
) -> Played:
    """Trains `steps` batches, or to the end of the data. Raises what a role raises, TimeoutError after `within_s`."""
    network = NetworkSection(long_poll_s=long_poll_s, call_deadline_s=60, startup_deadline_s=60)
    section = RolloutSection(group_size=group_size, alpha=alpha, concurrency=concurrency, **rollout)
    played = Played()

    async def main() -> None:
        wires = InProcessNetwork(network, through_codec=False)
        played.reward = TimedReward(fate_of, reward_of)
        transports = []

        async def serve(role, index, handle, peer_lost=ignore_loss):
            transport = wires.transport(Peer(role, index, 1))
            await transport.listen(handle, peer_lost)
            transports.append(transport)

        buffer = Buffer(
            run=RunSection(),
            rollout=section,
            batch=BatchSection(groups=groups),
            journal=JournalSection(fsync_s=10),
            evaluation=EvalSection(),
            network=network,
            tasks=tasks or Tasks(),
            folder=folder,
            clock=LoopClock(),
            filters=filters,
            reward_name="tests:reward",
            offload=in_place,
        )
        await buffer.start()
        await serve("buffer", 0, buffer.handle, buffer.peer_lost)
        await serve("reward", 0, played.reward.handle)
        proxy_end = wires.transport(Peer("proxy", 0, 1))
        for index in range(num_engines):
            engine = TimedEngine(slots, length_of or lengths(0), token_s)
            played.engines.append(engine)
            await serve("engine", index, engine.handle)
        names = [f"engine-{index}" for index in range(num_engines)]
        proxy = ProxyRole(
            engines={name: proxy_end.client(name) for name in names},
            rollout=section,
            network=network,
            clock=LoopClock(),
        )
        await proxy.start()
        await proxy_end.listen(proxy.handle, proxy.peer_lost)
        envs = []
        for index in range(num_envs):
            end = wires.transport(Peer("env", index, 1))
            envs.append(
                EnvRole(
                    name=f"env-{index}",
                    seed=0,
                    codec=CODEC,
                    rollout=section,
                    sampling=SamplingSection(max_new_tokens=max_new_tokens),
                    evaluation=EvalSection(),
                    network=network,
                    max_context_tokens=max_new_tokens + 10,
                    buffer=end.client("buffer-0"),
                    proxy=end.client("proxy-0"),
                    rewards=[end.client("reward-0")],
                    clock=LoopClock(),
                )
            )
        gang_end = wires.transport(Peer("controller", 0, 1, generation=1))
        running = [asyncio.create_task(env.run()) for env in envs]
        gang = asyncio.create_task(
            run_gang(gang_end.client("buffer-0"), gang_end.client("proxy-0"), steps, train_s, played)
        )
        try:
            async with asyncio.timeout(within_s):
                await asyncio.wait({gang, *running}, return_when=asyncio.FIRST_EXCEPTION)
            for task in (gang, *running):
                if task.done():
                    task.result()
            played.ledger = buffer._ledger
            played.leftovers = left_over(buffer, proxy, envs, played.engines)
        finally:
            for task in (gang, *running):
                task.cancel()
            await asyncio.gather(gang, *running, return_exceptions=True)
            await proxy.close()
            await buffer.close()

    run_virtual(main())
    return played


async def run_gang(buffer, proxy, steps, train_s, played):
    """Trains, then publishes, one after the other."""
    await publish(buffer, proxy, 0)
    while len(played.manifests) < steps:
        reply = await buffer.call(NextBatch(step=len(played.manifests) + 1), BatchReply, deadline_s=100)
        played.stats = reply.stats
        if reply.finished:
            played.finished = True
            break
        if reply.manifest is None:
            continue
        played.taken_at.append(asyncio.get_running_loop().time())
        played.manifests.append(reply.manifest)
        await asyncio.sleep(train_s)
        await publish(buffer, proxy, reply.manifest.step)
    await buffer.call(Finish(), Ack, deadline_s=100)


async def publish(buffer, proxy, version):
    weights = SharedWeights(version=version, segment="s", nbytes=0, tensors=[])
    await buffer.call(EnginesPaused(paused=True), Ack, deadline_s=100)
    await proxy.call(Update(weights=weights, deadline_s=60), Serving, deadline_s=100)
    await buffer.call(ServingVersion(version=version), Ack, deadline_s=100)


def left_over(buffer, proxy, envs, engines) -> Counter:
    maps = {
        "leases": buffer._leasing._leases,
        "revocations": buffer._leasing._revocations,
        "proxy queue": proxy._queue,
        "proxy units": proxy._queue._units,
        "proxy blocks": proxy._queue._blocks,
        "proxy running": proxy._running,
        "proxy aborted": proxy._aborted,
        "attempts": [attempt for env in envs for attempt in env._attempts],
        "reserved": range(sum(engine.requests + engine.outstanding_tokens for engine in proxy._engines)),
        "engines": [name for engine in engines for name in engine.aborts],
    }
    return Counter({name: len(kept) for name, kept in maps.items() if len(kept)})
