"""How the slots of one torchrun find each other: a Hello of each, one Roster of slot 0, in torchrun's store.

    slot k --Hello--> slot 0 --Roster--> slot k

torchrun starts all slots again when one has died, and they may meet what the slots before have left in the store: each
round has a number of its own, and a roster counts for the very processes whose nonces it has.
"""

import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from flashflow.errors import ConfigError, DeadlineError
from flashflow.launch.hosts import Host
from flashflow.launch.run_facts import RunFacts

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_S = 0.1
HEARING_S = 5.0
"""Slot 0 waits no longer for the others to hear a refusal."""


class Hello(msgspec.Struct, frozen=True):
    """What a slot says of itself."""

    rank: int
    host: Host
    machine: str
    """The same for hosts that are one machine, as virtual nodes are."""
    config: str
    """Digest of the config it was started with."""
    nonce: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))


class Roster(msgspec.Struct, frozen=True):
    """The run as slot 0 has prepared it, or why it may not start."""

    nonces: list[str]
    refusal: list[str] = []
    hosts: list[Host] = []
    seats: list[tuple[int, int]] = []
    """By rank of the slot: number of its host, number of the slot there."""
    facts: RunFacts | None = None
    folder: str = ""
    """The run folder, as an absolute path."""
    leftovers: list[str] = []
    """Ids of earlier runs of the folder, which have nothing left to do."""


Lead = Callable[[Sequence[Hello]], Roster]
"""Slot 0's part: prepares the run for these slots. Raises ConfigError."""


def meet(store: "Store", me: Hello, num_slots: int, lead: Lead, *, deadline_s: float) -> tuple[int, Roster]:
    """(number of the round, roster). Raises DeadlineError naming who is missing."""
    ends = time.monotonic() + deadline_s
    if me.rank == 0:
        return _lead(store, me, num_slots, lead, ends)
    number = 0
    while True:
        newest = store.add("round", 0)
        if newest > number:
            number = newest
            store.set(f"{number}/hello/{me.rank}", msgspec.json.encode(me).decode())
        if number and store.check([f"{number}/roster"]):
            roster = msgspec.json.decode(store.get(f"{number}/roster"), type=Roster)
            if roster.nonces[me.rank] == me.nonce:
                store.add(f"{number}/heard", 1)
                return number, roster
        _rest(ends, "slot 0 has not prepared the run")


def _lead(store: "Store", me: Hello, num_slots: int, lead: Lead, ends: float) -> tuple[int, Roster]:
    number = store.add("round", 1)
    hellos = [me]
    for rank in range(1, num_slots):
        while not store.check([f"{number}/hello/{rank}"]):
            _rest(ends, f"slot {rank} of {num_slots} has not come")
        hellos.append(msgspec.json.decode(store.get(f"{number}/hello/{rank}"), type=Hello))
    try:
        roster = lead(hellos)
    except ConfigError as error:
        roster = Roster(nonces=[hello.nonce for hello in hellos], refusal=error.mistakes)
    store.set(f"{number}/roster", msgspec.json.encode(roster).decode())
    if roster.refusal:
        # The store ends with the torchrun agent of this host: everybody is to hear why before.
        heard_by = time.monotonic() + HEARING_S
        while store.add(f"{number}/heard", 0) < num_slots - 1 and time.monotonic() < heard_by:
            time.sleep(POLL_S)
    return number, roster


def _rest(ends: float, what: str) -> None:
    if time.monotonic() > ends:
        raise DeadlineError(f"{what} within network.startup_deadline_s")
    time.sleep(POLL_S)


def gather(hellos: Sequence[Hello]) -> tuple[list[Host], list[tuple[int, int]]]:
    """(hosts, seats by rank), the hosts in natural order of their names. Pure.

    Raises ConfigError when slots were started with different configs, or an address cannot be reached from elsewhere.
    """
    names = sorted({hello.host.name for hello in hellos}, key=_natural)
    slots = {name: [hello for hello in hellos if hello.host.name == name] for name in names}
    mistakes = [
        f"--config: {hello.host.name} was started with another config than {hellos[0].host.name}; give all the same"
        for hello in hellos
        if hello.config != hellos[0].config
    ]
    if len({hello.machine for hello in hellos}) > 1:
        mistakes += [
            f"network.interface: {name} would bind to {slots[name][0].host.address}, where other hosts do not reach "
            "it; name an interface or an address"
            for name in names
            if slots[name][0].host.address.startswith(("127.", "::1"))
        ]
    if mistakes:
        raise ConfigError(list(dict.fromkeys(mistakes)))
    hosts = [_merged([hello.host for hello in slots[name]]) for name in names]
    seats = [(names.index(hello.host.name), slots[hello.host.name].index(hello)) for hello in hellos]
    return hosts, seats


def _merged(slots: Sequence[Host]) -> Host:
    """One host of several slots. Slots that may use different cores pin nothing: one may be shut out of another's."""
    first = slots[0]
    return Host(
        name=first.name,
        address=first.address,
        cores=first.cores if all(slot.cores == first.cores for slot in slots) else (),
        devices=tuple(dict.fromkeys(device for slot in slots for device in slot.devices)),
        slots=len(slots),
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """gpu-2 before gpu-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
