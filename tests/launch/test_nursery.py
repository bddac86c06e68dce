"""When roles are forked and when not. That what is forked works is shown by tests/test_processes.py."""

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from flashflow.launch import nursery
from flashflow.launch.link import RoleSpec
from tests.simulate.simulated_config import simulated_config


@pytest.fixture
def spec():
    return RoleSpec(
        role="engine",
        index=0,
        incarnation=1,
        generation=1,
        run_id="run",
        config="config.yaml",
        link_fd=-1,
        interface="127.0.0.1",
        carrier="shared_memory",
        supervisor_pid=os.getpid(),
        cpus=None,
        resume=False,
        key=None,
    )


def test_simulated_parts_have_no_nursery(tmp_path):
    with nursery.opened(simulated_config(tmp_path)) as opened:
        assert opened is None


def test_a_nursery_that_is_gone_forks_nothing_and_says_so(spec, tmp_path):
    async def scenario():
        started = nursery.Nursery.start(threads=1)
        started.close()
        ours, theirs = socket.socketpair()
        with ours, theirs, (tmp_path / "log").open("ab") as log:
            return await started.fork(spec, {}, theirs, log)

    assert asyncio.run(scenario()) is None


def test_a_nursery_whose_child_cannot_fork_says_so(spec, tmp_path):
    script = f"""
import os, socket
from flashflow.launch import nursery
from flashflow.launch.link import RoleSpec

def refused_below(pid):
    fork = os.fork
    def once():
        if os.getpid() != pid:
            os._exit(1)
        return fork()
    return once

os.fork = refused_below(os.getpid())
end, _ = socket.socketpair()
print(nursery._fork(end, nursery.Order({spec!r}, {{}}), 1, 2))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "0\n", ended.stderr
