"""Real torchrun on real hosts, as far as network namespaces are: the ring split every way, killed and cut off."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch

from flashflow.config import load_config
from tests.launch.nodes import AGENT, MAIN, TORCHRUN, Nodes, make_nodes
from tests.reference_loop import reference_loop
from tests.ring import final_weights, make_ring, metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 400
PORT = 29500


@pytest.fixture
def nodes(request):
    """As many hosts as the test's parameter `hosts` says, else two."""
    count = request.node.callspec.params.get("hosts", 2) if hasattr(request.node, "callspec") else 2
    yield from make_nodes(count)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return reference_loop(load_config(make_ring(tmp_path_factory.mktemp("reference"))))


class Torchrun:
    """One torchrun on each host, each with a log of its own."""

    def __init__(
        self,
        nodes: Nodes,
        config: Path,
        *arguments: str,
        slots: int = 1,
        max_restarts: int = 0,
        ipv6: bool = False,
        join_s: int = 60,
        program: list[str] = TORCHRUN,
    ) -> None:
        self.config = config
        self._stack = ExitStack()
        self.logs = [config.with_name(f"{name}.log") for name in nodes.names]
        self.processes = []
        for number, log in enumerate(self.logs):
            rendezvous = f"join_timeout={join_s},read_timeout=20,is_host={int(number == 0)}"
            command = nodes.command(
                number,
                *program,
                "--monitor-interval=0.1",
                f"--nnodes={len(nodes.names)}",
                f"--nproc-per-node={slots}",
                f"--max-restarts={max_restarts}",
                "--rdzv-backend=c10d",
                "--rdzv-id=test",
                f"--rdzv-endpoint={'[fd77::1]' if ipv6 else nodes.names[0]}:{PORT}",
                *([f"--local-addr=fd77::{number + 1}"] if ipv6 else []),
                f"--rdzv-conf={rendezvous}",
                str(MAIN),
                "--config",
                str(config),
                *arguments,
            )
            output = self._stack.enter_context(log.open("w"))
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            self.processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))

    def wait(self, seconds: float = WAIT_S) -> list[int]:
        """Exit codes, host by host."""
        ends = time.monotonic() + seconds
        try:
            return [process.wait(max(1.0, ends - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(self.output()) from error
        finally:
            self._stack.close()

    def output(self, number: int | None = None) -> str:
        logs = self.logs if number is None else [self.logs[number]]
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs)

    def until(self, pattern: str, *, times: int = 1) -> None:
        """Blocks until the hosts' output has it so often."""
        ends = time.monotonic() + WAIT_S
        while len(re.findall(pattern, self.output(), re.MULTILINE)) < times:
            assert time.monotonic() < ends, self.output()
            assert any(process.poll() is None for process in self.processes), self.output()
            time.sleep(0.05)

    def slots(self, number: int) -> list[psutil.Process]:
        """Of one host."""
        children = psutil.Process(self.processes[number].pid).children()
        return [child for child in children if str(MAIN) in child.cmdline()]

    def roles(self, number: int) -> dict[str, psutil.Process]:
        """By name, of one host."""
        found = {}
        for process in psutil.Process(self.processes[number].pid).children(recursive=True):
            line = process.cmdline()
            if "flashflow.launch.role" in line:
                spec = json.loads(line[-1])
                found[f"{spec['role']}-{spec['index']}"] = process
        return found


def nothing_left(nodes):
    return [psutil.Process(pid).cmdline() for number in range(len(nodes.names)) for pid in nodes.pids(number)]


@pytest.mark.parametrize(
    ("hosts", "slots", "roles", "ipv6"),
    [
        (1, 1, "trainer=1", False),
        (1, 3, "engine=2,env=2,reward=2", False),
        (2, 2, "engine=3,env=2", True),
        (3, 1, "engine=2,env=3", False),
    ],
)
def test_however_it_is_split_the_run_is_the_reference_loop_bit_for_bit(
    nodes, tmp_path, reference, hosts, slots, roles, ipv6
):
    run = Torchrun(nodes, make_ring(tmp_path), "--roles", roles, slots=slots, ipv6=ipv6)
    assert run.wait() == [0] * hosts, run.output()
    history, weights = reference
    assert [line["loss"] for line in metrics(run.config)] == [step["loss"] for step in history]
    final = final_weights(run.config)
    assert all(torch.equal(final[name], tensor) for name, tensor in weights.items())
    folder = load_config(run.config).run_folder
    assert list((folder / "keys").glob("*")) == []
    assert list((folder / "weights").glob("*")) == []
    logs = {path.name for path in (folder / "logs").iterdir()}
    assert {f"env-{n}.log" for n in range(int(roles[-1]) if "env" in roles else 1)} <= logs
    assert nothing_left(nodes) == []


@pytest.mark.parametrize("hosts", [2])
def test_two_trainer_ranks_on_two_hosts_are_one_gang(nodes, tmp_path, hosts):
    overrides = {"placement.nodes": {"trainer": "*", "engine": f"{nodes.names[1]}"}}
    run = Torchrun(nodes, make_ring(tmp_path, overrides=overrides), "--roles", "trainer=2,env=2")
    run.until(r"^step +1/4")
    assert ["trainer-0" in run.roles(0), "trainer-1" in run.roles(1)] == [True, True]
    killed = run.roles(1)["trainer-1"]
    killed.kill()
    assert run.wait() == [0] * hosts, run.output()
    assert "trainer-1 was killed by SIGKILL; the gang starts again from the newest checkpoint (generation 2)" in (
        run.output(0)
    )
    assert [line["step"] for line in metrics(run.config)] == [1, 2, 3, 4]


MISTAKES = {
    "--roles=engines=2": "--roles: 'engines=2' names no role; did you mean engine?",
    "placement.nodes.env=gpu*": "placement.nodes.env: 'gpu*' matches none of hosts",
}


@pytest.mark.parametrize("argument", MISTAKES)
def test_a_wrong_split_exits_2_on_every_node_with_one_message_and_no_traceback(nodes, tmp_path, argument):
    run = Torchrun(nodes, make_ring(tmp_path), argument, max_restarts=3, program=AGENT)
    assert run.wait() == [2, 2], run.output()
    for number in range(len(nodes.names)):
        output = run.output(number)
        assert output.count(MISTAKES[argument]) == 1, output
        assert "Traceback" not in output, output
    assert not load_config(run.config).run_folder.exists()


def test_under_plain_torchrun_a_slot_says_its_mistake_once_however_often_it_is_started(nodes, tmp_path):
    argument, message = next(iter(MISTAKES.items()))
    run = Torchrun(nodes, make_ring(tmp_path), argument, max_restarts=2)
    assert all(run.wait())
    assert [run.output(number).count(message) for number in (0, 1)] == [1, 1], run.output()
    assert "in run_slot" not in run.output()


def test_a_reward_that_raises_is_shown_first_and_not_tried_again(nodes, tmp_path):
    run = Torchrun(nodes, make_ring(tmp_path, reward="explode"), "--roles=env=2", max_restarts=2, program=AGENT)
    assert run.wait() == [1, 1], run.output()
    (shown,) = re.findall(r"^flashflow: env-\d failed: the reward function raised .*", run.output(), re.MULTILINE)
    assert shown in run.output(0)
    assert nothing_left(nodes) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_slot_is_started_again_and_the_run_ends(nodes, tmp_path, victim):
    overrides = {"run.steps": 12, "rollout.alpha": 1, "network.peer_deadline_s": 10}
    run = Torchrun(nodes, make_ring(tmp_path, overrides=overrides), "--roles=engine=2,env=2", max_restarts=3)
    run.until(r"^step +3/12")
    roles = list(run.roles(victim).values())
    assert roles
    run.slots(victim)[0].send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(roles, timeout=20)
    assert alive == []
    assert run.wait() == [0, 0], run.output()
    assert [line["step"] for line in metrics(run.config)] == list(range(1, 13))
    assert nothing_left(nodes) == []


def test_an_agent_that_is_killed_leaves_nothing_of_its_slots(nodes, tmp_path):
    overrides = {"run.steps": 500, "rollout.alpha": 1, "network.peer_deadline_s": 10, "network.shutdown_deadline_s": 20}
    run = Torchrun(nodes, make_ring(tmp_path, overrides=overrides), "--roles=engine=2,env=2", join_s=20)
    run.until(r"^step +2/500")
    below = [*run.slots(1), *run.roles(1).values()]
    run.processes[1].kill()
    _, alive = psutil.wait_procs(below, timeout=40)
    assert alive == []
    assert all(run.wait())
    assert nothing_left(nodes) == []


def test_sigterm_writes_a_checkpoint_everywhere_and_the_run_goes_on_afterwards(nodes, tmp_path):
    path = make_ring(tmp_path, overrides={"run.steps": 500, "rollout.alpha": 1, "checkpoint.every_steps": 0})
    run = Torchrun(nodes, path, "--roles=engine=2,env=2")
    run.until(r"^step +2/500")
    for process in run.processes:
        process.send_signal(signal.SIGTERM)
    assert all(run.wait())
    done = metrics(path)[-1]["step"]
    assert (load_config(path).run_folder / "checkpoints" / f"step-{done:06d}").exists()
    again = Torchrun(nodes, path, "--roles=env=2", "--continue", f"run.steps={done + 2}")
    assert again.wait() == [0, 0], again.output()
    assert [line["step"] for line in metrics(path)] == list(range(1, done + 3))


def test_a_link_cut_for_three_seconds_is_ridden_out(nodes, tmp_path):
    overrides = {"run.steps": 8, "rollout.alpha": 1}
    run = Torchrun(nodes, make_ring(tmp_path, overrides=overrides), "--roles=engine=2,env=2")
    run.until(r"^step +2/8")
    nodes.link(1, "down")
    time.sleep(3)  # the length of the cut is what is tested
    nodes.link(1, "up")
    assert run.wait() == [0, 0], run.output()
    assert [line["step"] for line in metrics(run.config)] == list(range(1, 9))


def test_a_link_cut_for_longer_than_the_deadline_ends_both_sides(nodes, tmp_path):
    overrides = {"run.steps": 500, "rollout.alpha": 1, "network.peer_deadline_s": 10, "network.shutdown_deadline_s": 20}
    run = Torchrun(nodes, make_ring(tmp_path, overrides=overrides), "--roles=engine=2,env=2", join_s=20)
    run.until(r"^step +2/500")
    nodes.link(1, "down")
    assert all(run.wait(150)), run.output()
    assert re.search(r"host \S+ gave no sign of life for network.peer_deadline_s = 10 s", run.output(0)), run.output(0)
    assert re.search(r"torchrun's store has not answered .* is cut off", run.output(1)), run.output(1)
    assert nothing_left(nodes) == []


def test_a_link_that_comes_back_after_the_deadline_heals_the_run(nodes, tmp_path):
    overrides = {"run.steps": 12, "rollout.alpha": 1, "network.peer_deadline_s": 10, "network.shutdown_deadline_s": 20}
    run = Torchrun(nodes, make_ring(tmp_path, overrides=overrides), "--roles=engine=2,env=2", max_restarts=3, join_s=90)
    run.until(r"^step +2/12")
    nodes.link(1, "down")
    run.until("is cut off")
    nodes.link(1, "up")
    assert run.wait() == [0, 0], run.output()
    assert [line["step"] for line in metrics(run.config)] == list(range(1, 13))
