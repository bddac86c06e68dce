"""The reward role with real worker processes; a function tells through a named pipe whom the role must end."""

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from flashflow.config.sections import RewardSection
from flashflow.errors import ConfigError, ContractError, RewardError
from flashflow.messages import Ack, Message, Score, ScoreReply
from flashflow.records import SampleId, Task
from flashflow.roles.reward import RewardRole
from flashflow.transport.channel import Peer

ENV = Peer("env", 0, 1)
PATIENCE_S = 30
FUNCTIONS = """
import os, subprocess, sys, time
from pathlib import Path

def act(completion, answer, folder=None):
    print("noise on standard output")
    match completion:
        case "hang":
            Path(folder, "told").write_text(str(os.getpid()))
            while True:
                pass
        case "spawn":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            Path(folder, "told").write_text(str(child.pid))
            while True:
                time.sleep(3600)
        case "raise":
            raise KeyError("unheard of")
        case "exit":
            sys.exit("out of here")
        case "crash":
            os._exit(17)
        case "nan":
            return float("nan")
    return {"reward": float(completion == answer), "length": len(completion)}

async def patient(completion):
    import asyncio
    if completion == "hang":
        await asyncio.Event().wait()
    return 1.0
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def section(functions: Path, name: str = "act", deadline_s: float = 30.0, **arguments) -> RewardSection:
    return RewardSection(function=f"{functions}:{name}", deadline_s=deadline_s, arguments=arguments)


def score(completion: str, member: int = 0) -> Score:
    return Score(
        sample=SampleId(3, member),
        purpose="train",
        prompt="2 + 2?",
        completion=completion,
        row=Task(cursor=3, row={"prompt": "2 + 2?", "answer": "4"}),
    )


async def emit(message: Message) -> None:
    raise AssertionError("a score is answered once")


def run(section: RewardSection, scenario: Callable[[RewardRole], Awaitable[None]]) -> None:
    async def main() -> None:
        role = RewardRole(section)
        try:
            await scenario(role)
        finally:
            await role.close()

    asyncio.run(main())


class Told:
    """A named pipe through which a function tells a process id."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._end = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def pid(self) -> int:
        ready, _, _ = select.select([self._end], [], [], PATIENCE_S)
        assert ready, "the function never ran"
        return int(os.read(self._end, 64))


def ends(pid: int) -> bool:
    """Waits until the process has ended, also one that is not a child of ours."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([watched], [], [], PATIENCE_S)
    os.close(watched)
    return bool(ready)


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path / "told")


def test_many_scores_at_once_get_their_own_answers(functions):
    async def scenario(role):
        await role.start()
        completions = ["4", "5", "44", ""] * 25
        replies = await asyncio.gather(*(role.handle(score(c), ENV, emit) for c in completions))
        assert replies == [
            ScoreReply(reward=float(c == "4"), components={"length": float(len(c))}) for c in completions
        ]

    run(section(functions), scenario)


def test_a_function_that_raises_is_answered_with_its_traceback_and_the_worker_lives(functions):
    async def scenario(role):
        reply = await role.handle(score("raise"), ENV, emit)
        assert reply.reward is None
        assert "KeyError: 'unheard of'" in reply.error
        assert "SystemExit: out of here" in (await role.handle(score("exit"), ENV, emit)).error
        assert "the reward is nan" in (await role.handle(score("nan"), ENV, emit)).error
        assert (await role.handle(score("4"), ENV, emit)).reward == 1.0
        assert sum(worker.starts for worker in role.pool.workers) == 1

    run(section(functions), scenario)


def test_a_hanging_function_costs_one_worker_and_its_sample_only(functions, tmp_path, told):
    async def scenario(role):
        reply = await role.handle(score("hang"), ENV, emit)
        assert reply == ScoreReply(reward=None, components={}, timed_out=True)
        assert ends(told.pid())
        assert (await role.handle(score("4"), ENV, emit)).reward == 1.0
        assert "1 past reward.deadline_s" in role.describe()

    run(section(functions, deadline_s=2.0, folder=str(tmp_path)), scenario)


def test_what_a_hanging_function_has_started_ends_with_it(functions, tmp_path, told):
    async def scenario(role):
        assert (await role.handle(score("spawn"), ENV, emit)).timed_out
        assert ends(told.pid())

    run(section(functions, deadline_s=2.0, folder=str(tmp_path)), scenario)


def test_a_cancelled_call_frees_its_worker(functions, tmp_path, told):
    async def scenario(role):
        call = asyncio.create_task(role.handle(score("hang"), ENV, emit))
        pid = await asyncio.to_thread(told.pid)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ends(pid)
        assert role.describe().startswith("reward: 0 calls, of which 0 run")
        assert (await role.handle(score("4"), ENV, emit)).reward == 1.0

    run(section(functions, folder=str(tmp_path)), scenario)


def test_an_answer_that_crashes_the_worker_is_unscored_and_the_next_is_scored(functions):
    async def scenario(role):
        assert await role.handle(score("crash"), ENV, emit) == ScoreReply(reward=None, components={})
        assert (await role.handle(score("4"), ENV, emit)).reward == 1.0
        assert "1 crashed a worker" in role.describe()

    run(section(functions), scenario)


def test_workers_end_when_the_role_is_killed(functions, tmp_path, told):
    code = (
        "import asyncio, sys\n"
        "from flashflow.config.sections import RewardSection\n"
        "from flashflow.messages import Score\n"
        "from flashflow.records import SampleId, Task\n"
        "from flashflow.roles.reward import RewardRole\n"
        "async def main():\n"
        "    role = RewardRole(RewardSection(function=sys.argv[1], arguments={'folder': sys.argv[2]}))\n"
        "    task = Task(cursor=0, row={'answer': ''})\n"
        "    hang = Score(sample=SampleId(0, 0), purpose='train', prompt='', completion='hang', row=task)\n"
        "    await role.handle(hang, None, None)\n"
        "asyncio.run(main())\n"
    )
    role = subprocess.Popen([sys.executable, "-c", code, f"{functions}:act", str(tmp_path)])
    pid = told.pid()
    role.kill()
    role.wait(30)
    assert ends(pid)


def test_async_functions_overlap_and_are_cancelled_at_the_deadline(functions):
    async def scenario(role):
        replies = await asyncio.gather(
            *(role.handle(score(c), ENV, emit) for c in ["hang"] * 20 + ["4"]),
        )
        assert all(reply.timed_out for reply in replies[:20])
        assert replies[20] == ScoreReply(reward=1.0, components={})
        assert role.pool is None

    run(section(functions, "patient", deadline_s=0.5), scenario)


def test_the_role_starts_only_with_a_function_it_can_load(tmp_path, functions):
    with pytest.raises(ConfigError, match="has no 'atc'; nearest: act"):
        RewardRole(section(functions, "atc"))

    once = tmp_path / "once.py"
    once.write_text("def f(completion): return 1.0\n")
    broken = RewardRole(RewardSection(function=f"{once}:f"))
    once.write_text("raise RuntimeError('not in a worker')\n")

    async def scenario() -> None:
        with pytest.raises(RewardError, match=r"(?s)cannot be loaded.*RuntimeError: not in a worker"):
            await broken.start()
        await broken.close()

    asyncio.run(scenario())


def test_any_other_message_breaks_the_contract(functions):
    async def scenario(role):
        with pytest.raises(ContractError, match="env-0-1 sent Ack"):
            await role.handle(Ack(), ENV, emit)

    run(section(functions), scenario)


def test_workers_are_no_more_than_the_cores(functions):
    role = RewardRole(section(functions))
    assert 1 <= len(role.pool.workers) <= min(4, os.cpu_count())
