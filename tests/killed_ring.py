"""Kills a run at its n-th message, as kill -9 does, goes on with it, and prints whether it ends in the same weights.

    python -m tests.killed_ring FOLDER n [n ...]

One line per n: `n equal`, or `n differs: ...`. Every run is a child forked before torch has made a thread.
"""

import os
import sys
from pathlib import Path

import torch

from flashflow.clock import LoopClock
from flashflow.config import load_config
from flashflow.launch.in_process import ring
from flashflow.launch.run import prepare
from flashflow.messages import Message
from flashflow.observe.progress import ProgressDisplay
from flashflow.simulate.clock import run_virtual
from flashflow.transport.channel import Peer
from tests.ring import final_weights, make_ring, metrics

KILLED = 9
NEVER = 1 << 30


def play(path: Path, *, resume: bool, killed_at: int = NEVER) -> None:
    """A whole run; it dies without a word at message `killed_at`."""
    display = ProgressDisplay()
    config = prepare(load_config(path), display, resume=resume, overwrite=False)
    messages = 0

    def count(peer: Peer, name: str, message: Message) -> float:
        nonlocal messages
        messages += 1
        if messages == killed_at:
            os._exit(KILLED)
        return 0.01

    async def main() -> None:
        await ring(config, display, resume=resume, clock=LoopClock(), delay=count)

    run_virtual(main())


def apart(path: Path, *, resume: bool, killed_at: int = NEVER) -> int:
    """`play` in a child; its exit code."""
    pid = os.fork()
    if pid == 0:
        sys.stdout = sys.stderr
        play(path, resume=resume, killed_at=killed_at)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def make(folder: Path) -> Path:
    # A checkpoint at step 2 of 4: points before, between and after it.
    return make_ring(folder, overrides={"run.runtime": "in_process", "placement.env": 2, "placement.engine": 2})


def verdict(folder: Path, undisturbed: Path, point: int) -> str:
    path = make(folder)
    if apart(path, resume=False, killed_at=point) != KILLED:
        return "differs: the run ended before that message"
    if apart(path, resume=True) != 0:
        return "differs: it did not go on"
    if [line["loss"] for line in metrics(path)] != [line["loss"] for line in metrics(undisturbed)]:
        return "differs: other losses"
    expected, found = final_weights(undisturbed), final_weights(path)
    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    return f"differs: {', '.join(wrong)}" if wrong else "equal"


def main() -> None:
    folder = Path(sys.argv[1])
    undisturbed = make(folder / "undisturbed")
    if apart(undisturbed, resume=False) != 0:
        raise SystemExit("the undisturbed run failed")
    for point in map(int, sys.argv[2:]):
        print(point, verdict(folder / str(point), undisturbed, point), flush=True)


if __name__ == "__main__":
    main()
