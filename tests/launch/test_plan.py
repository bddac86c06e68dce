from collections import Counter

import pytest

from flashflow.config.sections import Config
from flashflow.launch.plan import cores_wanted, plan
from flashflow.topology import FLEET, GANG

BASE = {
    "model": {"path": "org/model"},
    "data": {"source": {"kind": "reasoning_gym", "task": "chain_sum"}},
    "reward": {"function": "rewards:exact"},
}


def config(device="cpu", **placement):
    return Config.model_validate({**BASE, "model": {"path": "m", "device": device}, "placement": placement})


def cores_of(processes, role):
    return [process.affinity for process in processes if process.role == role]


def test_every_role_is_planned_as_often_as_placed():
    processes = plan(config(engine=2, env=3, reward=2), cores=range(8))
    assert Counter(process.role for process in processes) == {
        "buffer": 1, "reward": 2, "engine": 2, "proxy": 1, "env": 3, "trainer": 1, "controller": 1,
    }  # fmt: skip
    assert {process.role for process in processes} == {*FLEET, *GANG}
    assert len({process.name for process in processes}) == len(processes)


@pytest.mark.parametrize(
    ("placement", "cores", "trainer", "engines"),
    [
        ({}, [0, 1], [(0,)], [(1,)]),
        ({}, [3, 5, 7], [(3,)], [(5,)]),
        ({"engine": 3}, [0, 1], [(0,)], [(1,), (0,), (1,)]),  # dealt round when they are used up
        ({"engine": 1, "threads": 2}, [0, 1, 2, 3], [(0, 1)], [(2, 3)]),
        ({"engine": 1, "threads": 2}, [0, 1, 2], [(0, 1)], [(0, 1)]),  # two of three make one hand
        ({}, [0], [None], [None]),
        ({"threads": 4}, [0, 1], [None], [None]),
    ],
)
def test_computing_roles_get_cores_in_turn(placement, cores, trainer, engines):
    processes = plan(config(**placement), cores=cores)
    assert cores_of(processes, "trainer") == trainer
    assert cores_of(processes, "engine") == engines


def test_roles_that_wait_are_pinned_nowhere_and_have_one_thread():
    processes = plan(config(threads=4), cores=range(16))
    for process in processes:
        if process.role in ("trainer", "engine"):
            assert (process.threads, process.env["OMP_NUM_THREADS"]) == (4, "4")
        else:
            assert (process.affinity, process.threads, process.env["OMP_NUM_THREADS"]) == (None, 1, "1")


def test_on_cuda_nothing_is_pinned():
    assert {process.affinity for process in plan(config(device="cuda"), cores=range(8))} == {None}


def test_cores_wanted_counts_every_thread_of_engines_and_trainers():
    assert cores_wanted(config(engine=3, threads=2)) == 8  # (1 + 3) x 2
