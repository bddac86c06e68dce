"""What every slot must know of the run besides its config, which lies in the run folder."""

import msgspec

from flashflow.launch.plan import Carrier


class RunFacts(msgspec.Struct, frozen=True):
    """Decided once, by the slot that prepares the run."""

    run_id: str
    resume: bool
    carrier: Carrier
    key: str | None
    """Path of the run's CURVE key; None where all addresses are loopback."""
