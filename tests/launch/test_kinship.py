"""Nothing outlives its slot: real processes, killed."""

import subprocess
import sys
import time

import psutil
import pytest

from flashflow.launch.agent import exit_code
from flashflow.launch.kinship import scrubbed

PARENT = """
import os, subprocess, sys
from flashflow.launch import guard, kinship
kinship.adopt_orphans()
keeper = kinship.Guard()
marked = {**os.environ, guard.VARIABLE: keeper.mark}
role = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=marked, start_new_session=True, stdout=subprocess.PIPE)
grandchild = int(role.stdout.readline())
print(role.pid, grandchild, keeper.pid, flush=True)
for line in sys.stdin:
    match line.strip():
        case "role dies":
            role.kill(); role.wait()
            kinship.kill_group(role.pid)
            kinship.kill_adopted({keeper.pid})
            print("done", flush=True)
        case "close":
            keeper.close()
            print("done", flush=True)
"""

# A role that starts a process in a session of its own, as engine cores are started, and waits.
ROLE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


class Family:
    def __init__(self) -> None:
        self.parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, ROLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.role, self.grandchild, self.guard = map(psutil.Process, map(int, self._line().split()))

    def _line(self) -> str:
        return self.parent.stdout.readline()

    def tell(self, what: str) -> None:
        self.parent.stdin.write(f"{what}\n")
        self.parent.stdin.flush()
        assert self._line() == "done\n"


@pytest.fixture
def family():
    family = Family()
    yield family
    for process in (family.parent, family.role, family.grandchild):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    family.parent.wait()


def lives(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(*processes, seconds=20):
    """Dead; whether somebody has reaped them does not count."""
    ends = time.monotonic() + seconds
    while any(map(lives, processes)):
        if time.monotonic() > ends:
            return False
        time.sleep(0.02)
    return True


def test_a_killed_slot_takes_everything_with_it_whatever_session_it_chose(family):
    family.parent.kill()
    family.parent.wait()
    assert gone(family.role, family.grandchild, family.guard)


def test_what_a_dead_role_has_left_is_ended_by_its_slot(family):
    family.tell("role dies")
    assert gone(family.role, family.grandchild)
    assert family.guard.is_running()


def test_the_end_of_a_slot_ends_all_that_bears_its_mark(family):
    family.tell("close")
    assert gone(family.role, family.grandchild, family.guard, seconds=0)


def test_a_role_that_is_told_to_dies_with_its_parent():
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import os, sys, time\\n"
        "from flashflow.launch.kinship import die_with\\n"
        "die_with(int(sys.argv[1]))\\nprint(1, flush=True)\\ntime.sleep(600)', str(os.getpid())], "
        "stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nprint(child.pid, flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    assert gone(child)


def test_roles_do_not_hear_what_torchrun_tells_its_workers():
    env = {"RANK": "3", "MASTER_ADDR": "h", "TORCHELASTIC_RUN_ID": "x", "ROLE_RANK": "1", "HOME": "/", "RANKING": "1"}
    assert scrubbed(env) == {"HOME": "/", "RANKING": "1"}


@pytest.mark.parametrize(("codes", "code"), [([-15, 2], 2), ([1, 2], 1), ([-9], 137), ([143, -15], 143)])
def test_the_agent_ends_with_what_a_slot_said(codes, code):
    assert exit_code(codes) == code
