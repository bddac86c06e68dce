from collections import Counter

import pytest

from flashflow.config.sections import Config
from flashflow.errors import ConfigError
from flashflow.launch.hosts import Host, bind_address, source_address
from flashflow.launch.options import imagined_hosts, role_overrides
from flashflow.launch.picture import picture
from flashflow.launch.plan import carrier, cores_wanted, idle_devices, plan, shared_devices
from flashflow.launch.seats import format_range, parse_range
from flashflow.topology import FLEET, GANG

BASE = {
    "model": {"path": "org/model"},
    "data": {"source": {"kind": "reasoning_gym", "task": "chain_sum"}},
    "reward": {"function": "rewards:exact"},
}


def config(device="cpu", sections=None, **placement):
    return Config.model_validate(
        {**BASE, "model": {"path": "m", "device": device}, "placement": placement, **(sections or {})}
    )


def one_host(cores):
    return [Host("here", cores=tuple(cores))]


def gpu_hosts(*devices, cores=2):
    return [Host(f"h{n}", f"10.0.0.{n}", tuple(range(cores)), tuple(map(str, range(d)))) for n, d in enumerate(devices)]


def cores_of(processes, role):
    return [process.affinity for process in processes if process.role == role]


def devices_of(processes, role):
    return [process.devices for process in processes if process.role == role]


def hosts_of(processes, role):
    return [process.host for process in processes if process.role == role]


def mistakes(*arguments):
    with pytest.raises(ConfigError) as caught:
        plan(*arguments)
    return caught.value.mistakes


def test_every_role_is_planned_as_often_as_placed():
    processes = plan(config(engine=2, env=3, reward=2), one_host(range(8)))
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
        ({}, [], [None], [None]),
    ],
)
def test_computing_roles_get_cores_in_turn(placement, cores, trainer, engines):
    processes = plan(config(**placement), one_host(cores))
    assert cores_of(processes, "trainer") == trainer
    assert cores_of(processes, "engine") == engines


def test_roles_that_wait_are_pinned_nowhere_and_have_one_thread():
    for process in plan(config(threads=4), one_host(range(16))):
        if process.role in ("trainer", "engine"):
            assert (process.threads, process.env["OMP_NUM_THREADS"]) == (4, "4")
        else:
            assert (process.affinity, process.threads, process.env["OMP_NUM_THREADS"]) == (None, 1, "1")


def test_cores_wanted_counts_every_thread_of_engines_and_trainers():
    assert cores_wanted(config(engine=3, threads=2)) == 8  # (1 + 3) x 2


@pytest.mark.parametrize(
    ("placement", "hosts", "trainer", "engine", "env"),
    [
        ({"env": 4}, 2, [0], [1], [0, 1, 0, 1]),
        ({"trainer": 2, "engine": 2, "env": 1}, 2, [0, 0], [1, 1], [0]),
        ({"trainer": 2, "engine": 1}, 3, [0, 1], [2], [0]),
        ({"trainer": 4, "engine": 2}, 3, [0, 0, 1, 1], [2, 2], [0]),
        ({"engine": 2}, 1, [0], [0, 0], [0]),
        ({"trainer": 2, "engine": 4, "nodes": {"trainer": "h0", "engine": "h[12]"}}, 3, [0, 0], [1, 1, 2, 2], [0]),
        ({"env": 2, "nodes": {"env": "h2, h1"}}, 3, [0], [1], [1, 2]),
    ],
)
def test_without_devices_processes_go_round_the_hosts(placement, hosts, trainer, engine, env):
    processes = plan(config(**placement), gpu_hosts(*[0] * hosts))
    assert (hosts_of(processes, "trainer"), hosts_of(processes, "engine")) == (trainer, engine)
    assert hosts_of(processes, "env") == env
    for role in ("buffer", "proxy", "controller"):
        assert hosts_of(processes, role) == trainer[:1]
    assert {process.address for process in processes if process.host == 0} == {"10.0.0.0"}


@pytest.mark.parametrize(
    ("placement", "hosts", "trainer", "engine"),
    [
        ({"trainer": 4, "engine": 4}, [8], [(0,), (1,), (2,), (3,)], [(4,), (5,), (6,), (7,)]),
        ({"trainer": 4, "engine": 2, "tensor_parallel": 2}, [8], [(0,), (1,), (2,), (3,)], [(4, 5), (6, 7)]),
        ({"trainer": 2, "engine": 2}, [2, 2], [(0,), (1,)], [(2,), (3,)]),
        ({"trainer": 3, "engine": 1, "tensor_parallel": 4}, [4, 4], [(0,), (1,), (2,)], [(4, 5, 6, 7)]),
        ({"trainer": 2, "devices": {"trainer": "2-3"}}, [3, 1], [(2,), (3,)], None),
        ({"trainer": 2, "engine": 2, "devices": {"trainer": "0,3", "engine": "1-2"}}, [4], [(0,), (3,)], [(1,), (2,)]),
        ({"devices": {"engine": 0, "trainer": 1}}, [2], [(1,)], [(0,)]),
        ({"devices": {"engine": 0}}, [2], [(1,)], [(0,)]),
        ({"nodes": {"trainer": "h1", "engine": "h0"}}, [1, 1], [(1,)], [(0,)]),
        ({"engine": 2}, [1], [(0,)], [(0,), (0,)]),  # the only device serves all
    ],
)
def test_devices_are_given_in_order_and_groups_stay_within_a_host(placement, hosts, trainer, engine):
    if engine is None:
        assert mistakes(config("auto", **placement), gpu_hosts(*hosts)) == [
            "placement.devices.trainer: nobody has devices 1; give them to a role, or hide them from the run with "
            "CUDA_VISIBLE_DEVICES or --hosts and --devices"
        ]
        return
    processes = plan(config("auto", **placement), gpu_hosts(*hosts))
    assert devices_of(processes, "trainer") == trainer
    assert devices_of(processes, "engine") == engine


@pytest.mark.parametrize("num_hosts", [1, 4, 16, 64])
@pytest.mark.parametrize(("trainer_per_host", "tensor_parallel"), [(2, 1), (4, 1), (4, 2), (2, 2), (4, 4)])
def test_up_to_512_devices_each_is_given_once(num_hosts, trainer_per_host, tensor_parallel):
    total, trainer = 8 * num_hosts, trainer_per_host * num_hosts
    engine = (total - trainer) // tensor_parallel
    wanted = config("cuda", trainer=trainer, engine=engine, tensor_parallel=tensor_parallel, env=num_hosts)
    processes = plan(wanted, gpu_hosts(*[8] * num_hosts))
    given = [number for process in processes for number in process.devices]
    assert sorted(given) == list(range(total))
    for process in processes:
        assert {number // 8 for number in process.devices} <= {process.host}
        assert process.env["CUDA_VISIBLE_DEVICES"] == ",".join(str(number % 8) for number in process.devices)
    assert Counter(hosts_of(processes, "env")) == dict.fromkeys(range(num_hosts), 1)


def test_environments_and_rewards_go_to_hosts_without_devices_where_there_are_some():
    hosts = gpu_hosts(4, 0, 0)
    processes = plan(config("auto", trainer=2, engine=2, env=3, reward=2), hosts)
    assert (hosts_of(processes, "env"), hosts_of(processes, "reward")) == ([1, 2, 1], [1, 2])
    assert all("CUDA_VISIBLE_DEVICES" not in process.env for process in processes if process.host > 0)
    on_devices = plan(config("auto", trainer=2, engine=2, env=3, nodes={"env": "h0"}), hosts)
    assert hosts_of(on_devices, "env") == [0, 0, 0]
    assert {process.env["CUDA_VISIBLE_DEVICES"] for process in on_devices if process.role == "env"} == {""}


def test_device_names_are_those_that_the_host_inherited():
    host = Host("h", cores=(0, 1), devices=("5", "GPU-7f"))
    processes = plan(config("cuda"), [host])
    assert [process.env["CUDA_VISIBLE_DEVICES"] for process in processes if process.devices] == ["GPU-7f", "5"]
    assert {process.affinity for process in processes} == {None}  # the cores are idle


MISTAKES = [
    ({"trainer": 3, "devices": {"trainer": "0-3"}}, [4],
     "placement.devices.trainer: 0-3 are 4 devices, but placement.trainer 3 wants 3; set placement.trainer to 4"),
    ({"trainer": 2, "devices": {"trainer": "0-1", "engine": "1"}}, [2],
     "placement.devices.engine: 1 belong to placement.devices.trainer as well; placement.mode separate gives each its"),
    ({"devices": {"trainer": "0", "engine": "2"}}, [4],
     "placement.devices.engine: nobody has devices 1,3; give them to a role"),
    ({"devices": {"trainer": "8"}}, [8],
     "placement.devices.trainer: 8 goes past the last of 8 devices, 7; lower it"),
    ({"devices": {"trainer": "a-b"}}, [8], "placement.devices.trainer: 'a-b' is no range; write numbers and ranges"),
    ({"devices": {"trainer": "3-1"}}, [8], "placement.devices.trainer: '3-1' has the empty range 3-1"),
    ({"devices": {"trainer": "1,1"}}, [8], "placement.devices.trainer: '1,1' names a device twice"),
    ({"trainer": 4, "engine": 8}, [8],
     "placement.engine: 8 wants 8 devices, but of 8 on host h0 4 are free for it; set placement.engine to 4"),
    ({"trainer": 9}, [8], "placement.trainer: 9 wants 9 devices, but of 8 on host h0 8 are free for it; set "
     "placement.trainer to 8"),
    ({"trainer": 3, "engine": 2, "tensor_parallel": 2}, [3, 3],
     "placement.engine: 2 x placement.tensor_parallel 2 wants 4 devices, but of 6 on hosts h0, h1 3 are free for it, "
     "in groups within a host for 1 engine(s); choose a placement.tensor_parallel that divides 3"),
    ({"engine": 2, "tensor_parallel": 2, "devices": {"engine": "0-2"}}, [4],
     "placement.devices.engine: 0-2 are 3 devices, but placement.engine 2 x placement.tensor_parallel 2 wants 4; "
     "choose a placement.tensor_parallel that divides 3"),
    ({"engine": 1, "tensor_parallel": 2, "devices": {"engine": "1-2", "trainer": "0"}}, [2, 2],
     "placement.devices.engine: engine-0 would have devices 1 and 2 of different hosts (hosts h0, h1)"),
    ({"nodes": {"env": "cpu*"}}, [2], "placement.nodes.env: 'cpu*' matches none of host h0"),
    ({"nodes": {"trainer": "h1"}, "devices": {"trainer": "0"}}, [2, 2],
     "placement.devices.trainer: 0 has devices of host h0, which placement.nodes.trainer 'h1' leaves out"),
    ({"environment": {"engines": {"A": "1"}}}, [2], "placement.environment: 'engines' is no role; valid: buffer"),
]  # fmt: skip


@pytest.mark.parametrize(("placement", "hosts", "expected"), MISTAKES)
def test_what_does_not_fit_is_refused_with_field_and_remedy(placement, hosts, expected):
    found = mistakes(config("cuda", **placement), gpu_hosts(*hosts))
    assert any(mistake.startswith(expected) for mistake in found), found


def test_cuda_without_devices_is_refused():
    assert mistakes(config("cuda"), one_host([0]))[0].startswith("model.device: cuda, but no CUDA device is to be seen")


def test_weights_travel_in_shared_memory_on_one_host_and_by_file_between_hosts():
    def found(placement, hosts, weights="auto"):
        wanted = config(sections={"weights": {"carrier": weights}}, **placement)
        return carrier(wanted, plan(wanted, hosts))

    assert found({"engine": 2}, gpu_hosts(0)) == "shared_memory"
    assert found({"engine": 2}, gpu_hosts(0), "file") == "file"
    assert found({"engine": 2}, gpu_hosts(0, 0)) == "file"
    assert found({"engine": 2, "nodes": {"trainer": "h0", "engine": "h0"}}, gpu_hosts(0, 0)) == "shared_memory"
    with pytest.raises(ConfigError, match=r"weights.carrier: shared_memory does not cross hosts"):
        found({"engine": 2}, gpu_hosts(0, 0), "shared_memory")


def test_the_slots_of_a_host_share_its_processes():
    processes = plan(config(env=4), [Host("h", slots=3)])
    assert Counter(process.slot for process in processes) == {0: 4, 1: 3, 2: 3}


def test_variables_and_interpreter_of_a_role_are_its_own():
    wanted = config(
        environment={"engine": {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "7"}},
        sections={"engine": {"kind": "torch", "python": "/opt/vllm/bin/python"}},
    )
    by_role = {process.role: process for process in plan(wanted, one_host([0, 1]))}
    assert (by_role["engine"].env["NCCL_DEBUG"], by_role["engine"].env["OMP_NUM_THREADS"]) == ("INFO", "7")
    assert "NCCL_DEBUG" not in by_role["trainer"].env
    assert (by_role["engine"].python, by_role["trainer"].python) == ("/opt/vllm/bin/python", None)


def test_the_picture_shows_every_device():
    hosts = gpu_hosts(4, 2, 0)
    processes = plan(config("cuda", trainer=2, engine=2, tensor_parallel=2, env=2), hosts)
    assert picture(processes, hosts).splitlines() == [
        "h0  [T0 T1 E0 E0]  buffer proxy controller",
        "h1  [E1 E1      ]",
        "h2  [           ]  reward-0 env-0 env-1",
    ]
    assert (idle_devices(processes, hosts), shared_devices(processes)) == ([], [])


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", [0]), ("0-3,8", [0, 1, 2, 3, 8]), ("8, 1-2", [1, 2, 8]), ("5-5", [5])]
)
def test_ranges_are_read_and_written(text, numbers):
    assert parse_range(text) == numbers
    assert parse_range(format_range(numbers)) == numbers


def test_roles_on_the_command_line_override_the_placement():
    assert role_overrides("trainer=2, engine=2,env=4") == [
        "placement.trainer=2", "placement.engine=2", "placement.env=4",
    ]  # fmt: skip
    assert role_overrides(None) == []
    with pytest.raises(ConfigError) as caught:
        role_overrides("trainers=2,engine=0,env,buffer=2")
    assert caught.value.mistakes == [
        "--roles: 'trainers=2' names no role; did you mean trainer?",
        "--roles: 'engine=0' must be engine=N with N of 1 or more",
        "--roles: 'env' must be env=N with N of 1 or more",
        "--roles: 'buffer=2' names no role; valid: engine, env, reward, trainer",
    ]


def test_hosts_may_be_imagined():
    assert [(host.name, host.devices) for host in imagined_hosts("2", "2")] == [
        ("host-0", ("0", "1")),
        ("host-1", ("0", "1")),
    ]
    assert [(host.name, len(host.devices)) for host in imagined_hosts("a,b", "8,0")] == [("a", 8), ("b", 0)]
    for hosts, devices in (("0", None), ("a,,b", None), ("2", "1,2,3"), ("2", "x")):
        with pytest.raises(ConfigError, match=r"^--(hosts|devices): "):
            imagined_hosts(hosts, devices)


def test_the_interface_is_an_address_a_name_or_found_by_route():
    assert bind_address("auto") == "127.0.0.1"
    assert bind_address("lo") == "127.0.0.1"
    assert bind_address("127.0.0.1") == "127.0.0.1"
    assert source_address("127.0.0.1") == bind_address("auto", towards="127.0.0.1")
    with pytest.raises(ConfigError, match=r"network.interface: eth77 is no address and no interface of host"):
        bind_address("eth77")
