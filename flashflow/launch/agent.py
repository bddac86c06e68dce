"""`python -m flashflow.launch.agent [torchrun's options] launch/main.py ...`: torchrun with the exit code of its slots.

torchrun itself ends with 1 and a traceback whatever its workers say, and starts them again also when that cannot help.
Here it ends as soon as a slot has judged so, with the slot's code, which a batch script can act on.

SIGURG ends the run in order, as SIGTERM does. Slurm sends a signal to every process of a step, and that one means
nothing to any other.
"""

import os
import signal
import sys
from types import FrameType

VARIABLE = "FLASHFLOW_AGENT"
"""Of the environment of the slots: the process to tell a verdict."""
CODES = (1, 2)
"""Exit codes a verdict may have; told by the signal SIGRTMIN + code."""


def tell_verdict(code: int) -> None:
    """From a slot: end, with this code. Nobody listens under plain torchrun."""
    if os.environ.get(VARIABLE) == str(os.getppid()) and code in CODES:
        os.kill(os.getppid(), signal.SIGRTMIN + code)


def _obey(number: int, frame: FrameType | None) -> None:
    # torchrun ends its workers on the way out, and lets SystemExit pass.
    raise SystemExit(number - signal.SIGRTMIN)


def main() -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    def end_in_order(number: int, frame: FrameType | None) -> None:
        raise SignalException("told to end", signal.SIGTERM)

    os.environ[VARIABLE] = str(os.getpid())
    signal.signal(signal.SIGURG, end_in_order)
    for code in CODES:
        signal.signal(signal.SIGRTMIN + code, _obey)
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        sys.exit(exit_code([failure.exitcode for failure in error.failures.values()]))
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except RendezvousError as error:
        sys.exit(f"flashflow: torchrun's hosts do not meet: {error or type(error).__name__}")


def exit_code(codes: list[int]) -> int:
    """Of several slots: what one of them said itself counts more than that torchrun ended another."""
    said = [code for code in codes if code > 0]
    return said[0] if said else 128 - codes[0]


if __name__ == "__main__":
    main()
