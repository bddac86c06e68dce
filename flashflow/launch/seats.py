"""Seats for the processes of each role: which host, which devices. Pure; gathers mistakes instead of raising."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from flashflow.config.sections import Config
from flashflow.launch.hosts import Host


class Seat(NamedTuple):
    """Where one process sits."""

    host: int
    devices: tuple[int, ...] = ()
    """Numbers across all hosts; empty on CPUs."""


class Seats:
    """Gives seats of the hosts to the roles of a config."""

    def __init__(self, config: Config, hosts: Sequence[Host]) -> None:
        self.mistakes: list[str] = []
        self._placement = config.placement
        self._hosts = hosts
        self._host_of = [place for place, host in enumerate(hosts) for _ in host.devices]
        """By number of the device."""
        self._eligible = {role: self._select(role) for role in ("trainer", "engine", "env", "reward")}
        computes = not config.simulated
        self._on_devices = computes and config.model.device != "cpu" and bool(self._host_of)
        if computes and config.model.device == "cuda" and not self._host_of:
            self.mistakes.append(
                f"model.device: cuda, but no CUDA device is to be seen on {_names(hosts)}; set it to cpu, or run "
                "elsewhere (flashflow check --devices N plans for another machine)"
            )

    def computing(self) -> dict[str, list[Seat]]:
        """Seats of trainer ranks and engines."""
        if not self._on_devices:
            return self._on_cpus()
        placement = self._placement
        if self._one_device_for_all():
            return {"trainer": [Seat(0, (0,))], "engine": [Seat(0, (0,))] * placement.engine}
        given = {role: self._given(role) for role in ("trainer", "engine")}
        if self.mistakes:
            return {"trainer": [], "engine": []}
        taken = {number for numbers in given.values() if numbers is not None for number in numbers}
        self._check_overlap(given["trainer"], given["engine"])
        seats = {}
        for role, count, width in (("trainer", placement.trainer, 1), ("engine", placement.engine, self._width)):
            numbers = given[role]
            seats[role] = self._groups(role, numbers) if numbers is not None else self._free(role, count, width, taken)
            taken |= {number for seat in seats[role] for number in seat.devices}
        self._check_gaps(taken, given)
        return seats

    def beside(self, role: str, count: int) -> list[Seat]:
        """Seats of a role that needs no device: round the hosts it may have, those without devices first of all."""
        places = self._eligible[role]
        if self._on_devices and getattr(self._placement.nodes, role) is None:
            places = [place for place in places if not self._hosts[place].devices] or places
        return [Seat(places[index % len(places)]) for index in range(count)] if places else []

    @property
    def _width(self) -> int:
        return self._placement.tensor_parallel

    def _select(self, role: str) -> list[int]:
        patterns = getattr(self._placement.nodes, role)
        if patterns is None:
            return list(range(len(self._hosts)))
        wanted = [pattern.strip() for pattern in patterns.split(",")]
        found = [
            place
            for place, host in enumerate(self._hosts)
            if any(fnmatchcase(host.name, pattern) for pattern in wanted)
        ]
        if not found:
            self.mistakes.append(f"placement.nodes.{role}: {patterns!r} matches none of {_names(self._hosts)}")
        return found

    def _on_cpus(self) -> dict[str, list[Seat]]:
        """In blocks over the hosts: trainer ranks first, then engines, as far as both may have the same hosts."""
        placement, eligible = self._placement, self._eligible
        if not eligible["trainer"] or not eligible["engine"]:
            return {"trainer": [], "engine": []}
        if eligible["trainer"] != eligible["engine"]:
            return {role: _blocks(eligible[role], getattr(placement, role)) for role in ("trainer", "engine")}
        seats = _blocks(eligible["trainer"], placement.trainer + placement.engine)
        return {"trainer": seats[: placement.trainer], "engine": seats[placement.trainer :]}

    def _one_device_for_all(self) -> bool:
        """A single device in the whole run serves a trainer and engines together, unless devices are named."""
        placement = self._placement
        unnamed = placement.devices.trainer is None and placement.devices.engine is None
        return unnamed and len(self._host_of) == 1 and placement.trainer == 1 and self._width == 1

    # ---- devices by number

    def _given(self, role: str) -> list[int] | None:
        """The numbers that the config names; None when it names none or they are wrong."""
        text, field = getattr(self._placement.devices, role), f"placement.devices.{role}"
        if text is None:
            return None
        count, total = getattr(self._placement, role), len(self._host_of)
        width = self._width if role == "engine" else 1
        wanted = count * width
        try:
            numbers = parse_range(str(text))
        except ValueError as error:
            self.mistakes.append(f"{field}: {text!r} {error}; write numbers and ranges, e.g. 0-3,8")
            return None
        if numbers[-1] >= total:
            self.mistakes.append(f"{field}: {text} goes past the last of {total} devices, {total - 1}; lower it")
        elif len(numbers) != wanted:
            times = f" x placement.tensor_parallel {width}" if width > 1 else ""
            self.mistakes.append(
                f"{field}: {text} are {len(numbers)} devices, but placement.{role} {count}{times} wants {wanted}; "
                f"{_remedy(role, len(numbers), width)}"
            )
        elif outside := {self._host_of[number] for number in numbers} - set(self._eligible[role]):
            self.mistakes.append(
                f"{field}: {text} has devices of {_names([self._hosts[place] for place in sorted(outside)])}, which "
                f"placement.nodes.{role} {getattr(self._placement.nodes, role)!r} leaves out; change one of them"
            )
        return numbers

    def _groups(self, role: str, numbers: list[int]) -> list[Seat]:
        width = self._width if role == "engine" else 1
        seats = []
        for index, start in enumerate(range(0, len(numbers), width)):
            group = tuple(numbers[start : start + width])
            places = sorted({self._host_of[number] for number in group})
            if len(places) > 1:
                self.mistakes.append(
                    f"placement.devices.engine: engine-{index} would have devices {group[0]} and {group[-1]} of "
                    f"different hosts ({_names([self._hosts[place] for place in places])}); begin its "
                    f"placement.tensor_parallel {width} devices on one host"
                )
            seats.append(Seat(places[0], group))
        return seats

    def _free(self, role: str, count: int, width: int, taken: set[int]) -> list[Seat]:
        """The first free devices, in groups within a host."""
        free = [
            Seat(place, tuple(group))
            for place in self._eligible[role]
            for group in _whole(self._numbers(place, taken), width)
        ]
        if len(free) >= count:
            return free[:count]
        left = [number for place in self._eligible[role] for number in self._numbers(place, taken)]
        times = f" x placement.tensor_parallel {width}" if width > 1 else ""
        fits = f", in groups within a host for {len(free)} engine(s)" if width > 1 else ""
        self.mistakes.append(
            f"placement.{role}: {count}{times} wants {count * width} devices, but of {len(self._host_of)} on "
            f"{_names(self._hosts)} {len(left)} are free for it{fits}; {_remedy(role, len(left), width)}"
        )
        return []

    def _numbers(self, place: int, taken: set[int]) -> list[int]:
        return [number for number, host in enumerate(self._host_of) if host == place and number not in taken]

    def _check_overlap(self, trainer: list[int] | None, engine: list[int] | None) -> None:
        both = sorted(set(trainer or ()) & set(engine or ()))
        if both:
            self.mistakes.append(
                f"placement.devices.engine: {format_range(both)} belong to placement.devices.trainer as well; "
                "placement.mode separate gives each its own"
            )

    def _check_gaps(self, taken: set[int], given: dict[str, list[int] | None]) -> None:
        """Where devices are named, each has a use; else the last ones may be left over."""
        named = [f"placement.devices.{role}" for role, numbers in given.items() if numbers is not None]
        idle = [number for number in range(len(self._host_of)) if number not in taken]
        if named and idle and not self.mistakes:
            self.mistakes.append(
                f"{named[-1]}: nobody has devices {format_range(idle)}; give them to a role, or hide them from the "
                "run with CUDA_VISIBLE_DEVICES or --hosts and --devices"
            )


def parse_range(text: str) -> list[int]:
    """`0-3,8` -> [0, 1, 2, 3, 8], ascending. Raises ValueError saying what is wrong."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError("is no range")
        found = range(int(first), int(last if dash else first) + 1)
        if not found:
            raise ValueError(f"has the empty range {part.strip()}")
        numbers += found
    if len(set(numbers)) < len(numbers):
        raise ValueError("names a device twice")
    return sorted(numbers)


def format_range(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 3, 8] -> `0-3,8`."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in _runs(sorted(numbers)))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = None
    for place, number in enumerate(numbers):
        start = number if start is None else start
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield start, number
            start = None


def _blocks(places: Sequence[int], count: int) -> list[Seat]:
    return [Seat(places[index * len(places) // count]) for index in range(count)]


def _whole(numbers: Sequence[int], width: int) -> Iterator[Sequence[int]]:
    """Groups of `width`; what is left over at the end is in none."""
    return (numbers[start : start + width] for start in range(0, len(numbers) - width + 1, width))


def _remedy(role: str, devices: int, width: int) -> str:
    if devices % width:
        return f"choose a placement.tensor_parallel that divides {devices}"
    return f"set placement.{role} to {devices // width}" if devices else "give the run more devices"


def _names(hosts: Sequence[Host]) -> str:
    names = [host.name for host in hosts]
    return f"host{'s' if len(names) > 1 else ''} {', '.join(names if len(names) <= 4 else [*names[:3], '...'])}"
