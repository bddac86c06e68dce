"""Which process runs where: config and hosts in, processes with host, devices, cores and environment out. Pure.

Devices bear numbers across all hosts, in the order of the hosts. Engines and trainers compute without pause, so each
gets devices of its own or, on CPUs, `placement.threads` cores of its own, in turn: an OpenMP team that shares a core
with a busy process waits at every barrier for its descheduled thread (measured: 4 to 35 times slower). The other roles
mostly wait for messages and go where the scheduler puts them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flashflow.config.sections import Config
from flashflow.errors import ConfigError
from flashflow.launch.hosts import Host
from flashflow.launch.seats import Seat, Seats

COMPUTING_ROLES = ("trainer", "engine")
"""In the order in which they get devices or cores."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
DEVICE_VARIABLE = "CUDA_VISIBLE_DEVICES"

Carrier = Literal["shared_memory", "file"]


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process."""

    role: str
    index: int
    host: int
    """Number of the host it runs on."""
    slot: int
    """Number, on that host, of the slot that supervises it."""
    address: str
    """What its sockets bind to; the ports are free ones, known once they are bound."""
    devices: tuple[int, ...]
    """Numbers across all hosts."""
    threads: int
    """Of torch, OpenMP and BLAS."""
    affinity: tuple[int, ...] | None
    """Cores it may run on; None: any."""
    env: Mapping[str, str]
    """Laid over the environment it inherits."""
    python: str | None = None
    """Interpreter; None: the supervisor's."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


def plan(config: Config, hosts: Sequence[Host]) -> list[ProcessPlan]:
    """All processes, in the order in which they start. Raises ConfigError with every mistake of the placement.

    Nothing is pinned on a host that has fewer than two cores, or too few for a process to have distinct ones for its
    threads, or where the cores are idle anyway: the model is placed on devices, or simulated.
    """
    seats = Seats(config, hosts)
    table: dict[str, list[Seat]] = {
        **seats.computing(),
        "env": seats.beside("env", config.placement.env),
        "reward": seats.beside("reward", config.placement.reward),
    }
    mistakes = [*seats.mistakes, *_strangers(config)]
    if not mistakes:
        table |= {role: [Seat(table["trainer"][0].host)] for role in ("buffer", "proxy", "controller")}
        mistakes += _carrier_mistakes(config, table)
    if mistakes:
        raise ConfigError(mistakes)
    affinities = _affinities(config, hosts, table)
    started: Counter[int] = Counter()
    processes = []
    for role, count in process_counts(config).items():
        for index in range(count):
            seat = table[role][index]
            slot = started[seat.host] % hosts[seat.host].slots
            started[seat.host] += 1
            processes.append(_process(config, hosts, role, index, seat, slot, affinities.get((role, index))))
    return processes


def process_counts(config: Config) -> dict[str, int]:
    """Number of processes of each role, in the order in which they start: callees before their callers."""
    placement = config.placement
    return {
        "buffer": 1,
        "reward": placement.reward,
        "engine": placement.engine,
        "proxy": 1,
        "env": placement.env,
        "trainer": placement.trainer,
        "controller": 1,
    }


def carrier(config: Config, processes: Sequence[ProcessPlan]) -> Carrier:
    """How the weights travel."""
    if config.weights.carrier != "auto":
        return config.weights.carrier
    return "shared_memory" if len(_ends({role: _of(processes, role) for role in COMPUTING_ROLES})) == 1 else "file"


def cores_wanted(config: Config) -> int:
    """Cores that would let every engine and trainer compute undisturbed."""
    counts = process_counts(config)
    return sum(counts[role] for role in COMPUTING_ROLES) * config.placement.threads


def thread_variables(threads: int) -> dict[str, str]:
    """What bounds the threads of the libraries in a process, for its environment."""
    return {name: str(threads) for name in THREAD_VARIABLES}


def idle_devices(processes: Sequence[ProcessPlan], hosts: Sequence[Host]) -> list[int]:
    """Numbers of the devices that no process has."""
    used = {number for process in processes for number in process.devices}
    return [number for number in range(sum(len(host.devices) for host in hosts)) if number not in used]


def shared_devices(processes: Sequence[ProcessPlan]) -> list[int]:
    """Numbers of the devices that several processes have."""
    counts = Counter(number for process in processes for number in process.devices)
    return sorted(number for number, count in counts.items() if count > 1)


def _of(processes: Sequence[ProcessPlan], role: str) -> list[Seat]:
    return [Seat(process.host, process.devices) for process in processes if process.role == role]


def _ends(table: Mapping[str, Sequence[Seat]]) -> set[int]:
    """Hosts between which weights travel: from trainer rank 0 to the engines."""
    return {seat.host for seat in (*table["trainer"][:1], *table["engine"])}


def _carrier_mistakes(config: Config, table: Mapping[str, Sequence[Seat]]) -> list[str]:
    if len(_ends(table)) == 1:
        return []
    if config.simulated:
        return ["trainer.kind: simulated weights do not cross hosts; put trainer-0 and the engines on one"]
    if config.weights.carrier != "shared_memory":
        return []
    return [
        "weights.carrier: shared_memory does not cross hosts, but trainer-0 and the engines are on several; use auto"
    ]


def _strangers(config: Config) -> list[str]:
    counts = process_counts(config)
    return [
        f"placement.environment: {role!r} is no role; valid: {', '.join(counts)}"
        for role in config.placement.environment
        if role not in counts
    ]


def _affinities(
    config: Config, hosts: Sequence[Host], table: Mapping[str, Sequence[Seat]]
) -> dict[tuple[str, int], tuple[int, ...]]:
    """Deals the cores of each host round, `threads` at a time; the deal starts anew when they are used up."""
    threads, dealt = config.placement.threads, Counter[int]()
    found = {}
    for role in COMPUTING_ROLES:
        for index, seat in enumerate(table[role]):
            cores = hosts[seat.host].cores
            if seat.devices or config.simulated or config.model.device == "cuda" or len(cores) < max(2, threads):
                continue
            start = dealt[seat.host] % (len(cores) // threads) * threads
            found[role, index] = cores[start : start + threads]
            dealt[seat.host] += 1
    return found


def _process(
    config: Config,
    hosts: Sequence[Host],
    role: str,
    index: int,
    seat: Seat,
    slot: int,
    affinity: tuple[int, ...] | None,
) -> ProcessPlan:
    host = hosts[seat.host]
    threads = config.placement.threads if role in COMPUTING_ROLES else 1
    env = thread_variables(threads)
    if host.devices:
        first = sum(len(other.devices) for other in hosts[: seat.host])
        env[DEVICE_VARIABLE] = ",".join(host.devices[number - first] for number in seat.devices)
    python = getattr(config.engine, "python", None) if role == "engine" else None
    return ProcessPlan(
        role=role,
        index=index,
        host=seat.host,
        slot=slot,
        address=host.address,
        devices=seat.devices,
        threads=threads,
        affinity=affinity,
        env={**env, **config.placement.environment.get(role, {})},
        python=None if python is None else str(python),
    )
