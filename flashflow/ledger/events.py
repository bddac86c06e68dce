"""Everything that can happen to the ledger, as it is written to the journal.

Encoded as arrays, so a field is only ever added at the end, with a default.
"""

import msgspec

from flashflow.records import Manifest, Outcome

FORMAT = 1
"""Raised when an old journal could no longer be read."""


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of events; the tag is the class name."""


class Location(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Where a payload lies in the journal."""

    segment: int
    offset: int
    """Bytes from the start of the segment to the record's header."""
    length: int
    """Bytes of the record without its header."""


class Opened(Event, frozen=True):
    """A buffer process begins; it heads every transitions file. All leases end, for their holders are unknown to it."""

    format: int
    opening: int
    """Ordinal of buffer processes from 0; lease epochs of different openings never meet."""
    run: str
    """Name of the run, for a person."""
    seed: int
    group_size: int
    groups: int
    """Per batch."""
    alpha: float


class Served(Event, frozen=True):
    """Every engine that takes requests serves at least `version`."""

    version: int


class Admitted(Event, frozen=True):
    """Group `group` exists, with all its members, and works on the task at `cursor`."""

    group: int
    cursor: int
    retry: int
    """Times the task had been admitted before."""
    num_members: int
    """The group size and the redundant members."""


class Leased(Event, frozen=True):
    """`served` is the lowest version served at that moment: no token of the attempt is older."""

    group: int
    member: int
    epoch: int
    served: int


class LeaseExpired(Event, frozen=True):
    """The holder is gone; the attempt is given out again under the next epoch."""

    group: int
    member: int


class Committed(Event, frozen=True):
    """A finished attempt, its payload written. When it makes the group complete, members still out are surplus."""

    group: int
    member: int
    epoch: int
    initiating_version: int
    num_tokens: int
    num_sampled: int
    reward: float | None
    outcome: Outcome
    payload: Location


class PayloadLost(Event, frozen=True):
    """The host died before a commit's payload was on its disk; the attempt is given out again."""

    group: int
    member: int


class Retried(Event, frozen=True):
    """The attempt failed; it is given out again with the next retry."""

    group: int
    member: int
    reason: str
    num_sampled: int = 0
    """Tokens that it had sampled."""


class Failed(Event, frozen=True):
    """The attempt failed too often; the member stays in its group without a reward."""

    group: int
    member: int
    reason: str
    num_sampled: int = 0
    """Tokens that its last attempt had sampled."""


class GroupFailed(Event, frozen=True):
    """No member has a usable reward, or under `failures: filter` one has none: the capacity is returned."""

    group: int


class GroupFiltered(Event, frozen=True):
    """A filter drops the complete group; the capacity is returned, so that another is admitted."""

    group: int


class GroupExpired(Event, frozen=True):
    """Too old for any batch to come, or without a quorum at the deadline; `returned`: its task is admitted again."""

    group: int
    returned: bool
    at_deadline: bool = False


class GroupClosed(Event, frozen=True):
    """At the deadline the group had a quorum: it is complete, and its members still out are expired."""

    group: int


class GroupSurplus(Event, frozen=True):
    """A redundant group that came too late for every batch to come."""

    group: int


class Superseded(Event, frozen=True):
    """An attempt without the current lease ended; only the waste is remembered."""

    group: int
    member: int
    epoch: int
    num_sampled: int


class Taken(Event, frozen=True):
    """Batch `manifest.step` is made: its committed samples are consumed, those of `manifest.replaced` filtered; commits
    that their group had no row for are surplus."""

    manifest: Manifest
    stored: list[int] = []
    """Groups that later batches may replay, oldest first."""


class Covered(Event, frozen=True):
    """A durable checkpoint holds every batch up to `step`."""

    step: int


AnyEvent = (
    Opened | Served | Admitted | Leased | LeaseExpired | Committed | PayloadLost | Retried | Failed
    | GroupFailed | GroupFiltered | GroupExpired | GroupClosed | GroupSurplus | Superseded | Taken | Covered
)  # fmt: skip
