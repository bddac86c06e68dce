"""Every exception flashflow raises on purpose.

FlashflowError
├── ConfigError          the config, or something it names, is wrong: exit 2 before any process starts
├── ContractError        a promise between components is broken: the run stops with the message, exit 1
│   ├── RewardError      a reward function raised
│   ├── JournalError     a journal record in the middle of a stream is damaged
│   └── WeightsError     weights do not fit, or do not match their digest
├── TransportError       a message could not be delivered or answered
│   ├── DeadlineError    no answer within the deadline of the config
│   ├── PeerLost         the other end died or left
│   ├── NotServing       an engine does not hold the weights that a request needs
│   └── RemoteError      the other end raised while it handled the call
├── EnvironmentBroken    an environment crashed: the attempt is tried again
└── BudgetError          a bounded number of retries or restarts is used up
"""


class FlashflowError(Exception):
    """Root of the tree."""


class ConfigError(FlashflowError):
    """Holds *all* mistakes found, one line each."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = mistakes
        super().__init__("\n".join(mistakes))


class ContractError(FlashflowError):
    """A broken contract between components; stops the run."""


class RewardError(ContractError):
    """A reward function raised; carries its traceback as text."""


class JournalError(ContractError):
    """A damaged record that is not the torn last one."""


class WeightsError(ContractError):
    """Weights that do not fit the engine, or whose digest differs."""


class TransportError(FlashflowError):
    """A message could not be delivered or answered."""


class DeadlineError(TransportError):
    """No answer within the deadline."""


class PeerLost(TransportError):
    """The other end died or left."""


class NotServing(TransportError):
    """An engine does not hold the weights that a request needs; another engine, or a later moment, may."""


class RemoteError(TransportError):
    """The other end raised; `kind` is the name of its exception class."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {message}")


class EnvironmentBroken(FlashflowError):
    """An environment crashed or misbehaved; its attempt is tried again within the budget."""


class BudgetError(FlashflowError):
    """A bounded number of retries, restarts or failures is used up."""


def first_cause(error: BaseException) -> BaseException:
    """The first exception inside nested groups, as task groups raise them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
