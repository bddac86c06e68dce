"""Control of the trainer gang by torch.distributed RPC (TensorPipe): a world lives and dies whole, one a generation.

RPC pickles by nature, so only names of methods and msgpack bytes cross it, a few kB each; trajectories never do
(contract 6).
"""

import asyncio
import socket
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from flashflow.errors import ContractError, DeadlineError, FlashflowError, RemoteError
from flashflow.records import Manifest, StagedWeights
from flashflow.trainers.base import TrainResult

CONTROLLER = "controller-0"
NUM_THREADS = 4
SCHEME = "flashflow"
"""Of the URL that leads init_rpc, which takes no store, to the meeting."""
BACKLOG = 1024
"""Ranks that may knock at a meeting at once."""

Serve = Callable[[str, bytes], Awaitable[bytes]]
_served: tuple[asyncio.AbstractEventLoop, Serve] | None = None
_serving = threading.Event()


def trainer_name(rank: int) -> str:
    return f"trainer-{rank}"


def host_meeting(interface: str, *, deadline_s: float) -> tuple[Store, str]:
    """A store in which a generation of the gang meets, listening on `interface` only, and its endpoint `host:port`."""
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    with socket.create_server((interface, 0), family=family, backlog=BACKLOG) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            interface,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_s),
            master_listen_fd=listener.detach(),  # bound already: no race for the port
        )
    return store, f"{interface}:{port}"


def enter_meeting(endpoint: str, *, deadline_s: float) -> Store:
    """Raises DeadlineError when its host cannot be reached."""
    host, _, port = endpoint.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=deadline_s))
    except RuntimeError as error:
        raise DeadlineError(f"the meeting of the gang at {endpoint} cannot be reached: {error}") from error


def join(name: str, *, rank: int, world_size: int, meeting: Store, deadline_s: float) -> None:
    """Enter the world of this generation; returns when all members are in. Raises DeadlineError naming the world."""

    def rendezvous(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
        yield PrefixStore("rpc", meeting), rank, world_size

    register_rendezvous_handler(SCHEME, rendezvous)  # type: ignore[no-untyped-call]
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=NUM_THREADS,
        rpc_timeout=deadline_s,
        init_method=f"{SCHEME}://",
        # Sockets only: the shared-memory transport polls without pause, 44 % of a core for a few calls a second.
        _transports=["uv"],
        _channels=["basic"],
    )
    try:
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        raise DeadlineError(f"{name} could not enter the RPC world of {world_size}: {error}") from error


def leave() -> None:
    """Without waiting for the others: a dead one must not hold the living."""
    rpc.shutdown(graceful=False)


def serve(loop: asyncio.AbstractEventLoop, handler: Serve) -> None:
    """Answer calls of the controller with `handler`, run on `loop`."""
    global _served
    _served = (loop, handler)
    _serving.set()


def _answer(method: str, payload: bytes, deadline_s: float) -> tuple[str, bytes]:
    """Runs in an RPC thread of the callee; returns (name of the exception, its text) or ("", answer).

    A member is in the world before its model is loaded: the first call waits for that.
    """
    if not _serving.wait(deadline_s) or _served is None:
        return "DeadlineError", f"the trainer was not ready to serve within {deadline_s:.0f} s".encode()
    loop, handler = _served
    try:
        return "", asyncio.run_coroutine_threadsafe(_as_coroutine(handler, method, payload), loop).result()
    except FlashflowError as error:
        return type(error).__name__, str(error).encode()
    except Exception as error:
        return type(error).__name__, "".join(traceback.format_exception(error)).encode()


async def _as_coroutine(handler: Serve, method: str, payload: bytes) -> bytes:
    return await handler(method, payload)


class RpcTrainerLink:
    """A controller's TrainerLink onto all ranks of the gang: every call goes to each, rank 0's answer counts."""

    def __init__(self, *, num_ranks: int, deadline_s: float) -> None:
        self._num_ranks = num_ranks
        self._deadline_s = deadline_s

    async def open(self, resume: bool) -> int:
        answers = await self._call_all("open", msgspec.msgpack.encode(resume))
        steps = [msgspec.msgpack.decode(answer, type=int) for answer in answers]
        if len(set(steps)) > 1:
            raise ContractError(f"the trainer ranks opened at different steps: {steps}")
        return steps[0]

    async def train(self, manifest: Manifest) -> TrainResult:
        answer = await self._call("train", msgspec.msgpack.encode(manifest))
        return msgspec.msgpack.decode(answer, type=TrainResult)

    async def stage(self, *, fresh: bool) -> StagedWeights:
        answer = await self._call("stage", msgspec.msgpack.encode(fresh))
        staged: StagedWeights = msgspec.msgpack.decode(answer, type=StagedWeights)
        return staged

    async def save(self) -> Path:
        return Path((await self._call("save", b"")).decode())

    async def _call(self, method: str, payload: bytes) -> bytes:
        """Rank 0's answer, once all ranks have answered."""
        return (await self._call_all(method, payload))[0]

    async def _call_all(self, method: str, payload: bytes) -> list[bytes]:
        """Raises the first failure of any rank at once: the others may wait for it in a collective."""
        calls = [asyncio.create_task(self._call_rank(rank, method, payload)) for rank in range(self._num_ranks)]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()

    async def _call_rank(self, rank: int, method: str, payload: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[tuple[str, bytes]] = loop.create_future()
        future = rpc.rpc_async(
            trainer_name(rank), _answer, args=(method, payload, self._deadline_s), timeout=self._deadline_s
        )

        def done(finished: "torch.futures.Future[tuple[str, bytes]]") -> None:
            loop.call_soon_threadsafe(_settle, trainer_name(rank), answered, finished)

        future.then(done)
        kind, answer = await answered
        if kind in _ERRORS:
            raise _ERRORS[kind](answer.decode())
        if kind:
            raise RemoteError(kind, answer.decode())
        return answer


_ERRORS: dict[str, type[FlashflowError]] = {"ContractError": ContractError, "DeadlineError": DeadlineError}


def _settle(
    name: str,
    answered: "asyncio.Future[tuple[str, bytes]]",
    finished: "torch.futures.Future[tuple[str, bytes]]",
) -> None:
    if answered.done():
        return
    try:
        answered.set_result(finished.value())
    except RuntimeError as error:
        answered.set_exception(DeadlineError(f"{name} did not answer over RPC: {error}"))


def init_process_group(device: str, *, rank: int, world_size: int, meeting: Store, deadline_s: float) -> None:
    """The trainer ranks' collectives: NCCL on GPUs, Gloo on CPUs."""
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=PrefixStore("group", meeting),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=deadline_s),
    )
