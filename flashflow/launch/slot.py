"""One worker of torchrun: a slot, which supervises its share of the role processes. `launch/main.py` calls it.

    torchrun [--nnodes N] launch/main.py --config C [--roles trainer=2,engine=2,env=4] [section.key=value ...]

Exit codes are those of `flashflow train`. torchrun starts slots again that end with another code than 0: what would
only fail again says so once and then ends at once, what may have been bad luck (a killed slot, a cut link) is resumed.
"""

import argparse
import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flashflow.config import Config, dump_config, load_config
from flashflow.errors import ConfigError, FlashflowError
from flashflow.launch import kinship, run
from flashflow.launch.agent import tell_verdict
from flashflow.launch.console import MergedLogs
from flashflow.launch.directory import Over
from flashflow.launch.hosts import Host, bind_address, source_address, this_host
from flashflow.launch.options import role_overrides
from flashflow.launch.plan import ProcessPlan, plan
from flashflow.launch.session import Hello, Roster, gather, meet
from flashflow.launch.startup import StartupLog, process_began, startup_path
from flashflow.launch.store_directory import StoreDirectory
from flashflow.launch.supervise import Supervisor
from flashflow.observe.progress import ProgressDisplay
from flashflow.transport.weights.segment import remove_segments

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

AGENT_GRACE_S = 5.0
"""From SIGTERM to SIGKILL for a torchrun agent that is cut off."""


class Worker(msgspec.Struct, frozen=True):
    """What torchrun tells its workers."""

    rank: int
    num_slots: int
    local_rank: int
    attempt: int
    torchrun_id: str
    store_host: str
    store_port: int

    @classmethod
    def read(cls, env: Mapping[str, str]) -> "Worker":
        """Raises ConfigError outside torchrun."""
        try:
            return cls(
                rank=int(env["RANK"]),
                num_slots=int(env["WORLD_SIZE"]),
                local_rank=int(env["LOCAL_RANK"]),
                attempt=int(env["TORCHELASTIC_RESTART_COUNT"]),
                torchrun_id=env["TORCHELASTIC_RUN_ID"],
                store_host=env["MASTER_ADDR"],
                store_port=int(env["MASTER_PORT"]),
            )
        except KeyError as error:
            raise ConfigError(
                [f"{error.args[0]}: not set; start this with torchrun, or use flashflow train on one machine"]
            ) from error


class Verdict(msgspec.Struct, frozen=True):
    """Starting again would end the same way."""

    code: int


class Slot:
    def __init__(self, worker: Worker, config: Config, options: argparse.Namespace, display: ProgressDisplay) -> None:
        self._worker = worker
        self._config = config
        self._options = options
        self._display = display
        self._store = self._connect()
        self.verdict: int | None = None
        """Exit code, when starting again would end the same way."""

    def run(self) -> int:
        """The exit code. Raises ConfigError with what slot 0 refuses."""
        if self._store.check(["verdict"]):
            self.verdict = msgspec.json.decode(self._store.get("verdict"), type=Verdict).code
            return self.verdict
        with contextlib.ExitStack() as stack:
            number, roster = meet(
                self._store,
                self._hello(),
                self._worker.num_slots,
                lambda hellos: self._lead(hellos, stack),
                deadline_s=self._config.network.startup_deadline_s,
            )
            if roster.facts is None:
                self._judge(2)
                raise ConfigError(roster.refusal)
            config = self._stored_config(roster)
            for run_id in roster.leftovers:
                remove_segments(run_id)
            try:
                over, cut_off = asyncio.run(self._supervise(config, roster, f"{number}"))
            finally:
                run.tidy(roster.facts)
            return self._conclude(config, over, cut_off=cut_off)

    # ---- before

    def _connect(self) -> "Store":
        from datetime import timedelta

        from torch._C._distributed_c10d import PrefixStore, TCPStore

        worker, deadline_s = self._worker, self._config.network.startup_deadline_s
        store = TCPStore(worker.store_host, worker.store_port, is_master=False, timeout=timedelta(seconds=deadline_s))
        return PrefixStore(f"flashflow/{worker.torchrun_id}", store)

    def _hello(self) -> Hello:
        several = self._worker.num_slots > 1
        address = bind_address(self._config.network.interface, towards=self._worker.store_host if several else None)
        return Hello(
            rank=self._worker.rank,
            host=this_host(address),
            machine=Path("/proc/sys/kernel/random/boot_id").read_text().strip() + _network_namespace(),
            config=hashlib.sha256(dump_config(self._config).encode()).hexdigest(),
        )

    def _lead(self, hellos: Sequence[Hello], stack: contextlib.ExitStack) -> Roster:
        """Plans for all slots and prepares the run folder. A second round of the same torchrun goes on."""
        config, options = self._config, self._options
        hosts, seats = gather(self._reachable(hellos))
        plan(config, hosts)  # a wrong split leaves no trace
        stack.enter_context(run.locked(config.run_folder))
        leftovers = run.remove_leftovers(config.run_folder)
        there = (config.run_folder / "config.yaml").exists()
        resume = self._store.check(["prepared"]) or options.resume or (options.go_on and there)
        config = run.prepare(config, self._display, resume=resume, overwrite=options.overwrite)
        self._store.set("prepared", "yes")
        return Roster(
            nonces=[hello.nonce for hello in hellos],
            hosts=hosts,
            seats=seats,
            facts=run.run_facts(config, plan(config, hosts), hosts, resume=resume),
            folder=str(config.run_folder.resolve()),
            leftovers=leftovers,
        )

    def _reachable(self, hellos: Sequence[Hello]) -> list[Hello]:
        """With the address of this host as others see it: towards torchrun's store, which it hosts, it is loopback."""
        mine = hellos[0].machine
        others = [hello.host.address for hello in hellos if hello.machine != mine]
        if not others or self._config.network.interface != "auto":
            return list(hellos)
        address = source_address(others[0])
        return [
            msgspec.structs.replace(hello, host=msgspec.structs.replace(hello.host, address=address))
            if hello.machine == mine
            else hello
            for hello in hellos
        ]

    def _stored_config(self, roster: Roster) -> Config:
        """Of the run folder, which every host must see. Raises ConfigError where it does not."""
        folder = Path(roster.folder)
        entry = folder / "gang" / f"{roster.facts.run_id if roster.facts else ''}-1"
        ends = time.monotonic() + self._config.network.peer_deadline_s
        while not entry.is_dir():
            if time.monotonic() > ends:
                raise ConfigError(
                    [
                        f"run.folder: {this_host().name} does not see {folder}, which {roster.hosts[0].name} has "
                        "prepared; it must lie on a file system that all hosts share"
                    ]
                )
            time.sleep(0.2)
        return load_config(folder / "config.yaml")

    # ---- during

    async def _supervise(self, config: Config, roster: Roster, number: str) -> tuple[Over, bool]:
        from torch._C._distributed_c10d import PrefixStore

        assert roster.facts is not None
        worker = self._worker
        host, slot = roster.seats[worker.rank]
        mine = [p for p in plan(config, roster.hosts) if (p.host, p.slot) == (host, slot)]
        directory = StoreDirectory(
            PrefixStore(number, self._store),
            slot=worker.rank,
            names=[_slot_name(roster.hosts, seat) for seat in roster.seats],
            heartbeat_s=config.network.heartbeat_s,
            deadline_s=config.network.peer_deadline_s,
        )
        leads = worker.rank == 0
        if leads:
            self._display.start(config.run.steps, first_step=run.steps_done(config))
        supervisor = Supervisor(
            config,
            mine,
            roster.facts,
            directory=directory,
            display=self._display if leads else None,
            startup=StartupLog(self._startup_path(config), process_began()),
            impatient=False,
        )
        console = MergedLogs(_logs(config, mine, roster.hosts))
        following = asyncio.create_task(console.follow())
        try:
            return await supervisor.run(), directory.cut_off
        finally:
            following.cancel()
            console.print_news(all_of_it=True)

    def _startup_path(self, config: Config) -> Path:
        """The clocks of hosts differ: each slot has a file of its own."""
        path = startup_path(config.run_folder)
        return path if self._worker.rank == 0 else path.with_stem(f"{path.stem}-{self._worker.rank}")

    # ---- afterwards

    def _conclude(self, config: Config, over: Over, *, cut_off: bool) -> int:
        if cut_off:
            print(f"flashflow: {over.failure}", file=sys.stderr, flush=True)
            self._await_store(config.network.peer_deadline_s)
            return over.code
        if over.permanent:
            self._judge(over.code)
        if self._worker.rank == 0:
            if over.failure is not None:
                print(f"flashflow: {over.failure}", file=sys.stderr, flush=True)
            self._display.finish(run.summary(config, over.code))
        return over.code

    def _judge(self, code: int) -> None:
        self.verdict = code
        self._store.set("verdict", msgspec.json.encode(Verdict(code)).decode())

    def _await_store(self, deadline_s: float) -> None:
        """Until torchrun's agent can meet the others again; an agent that never can waits for ever (measured), and is
        ended, so that whoever has started it hears of it."""
        ends = time.monotonic() + deadline_s
        while time.monotonic() < ends:
            with contextlib.suppress(OSError):
                socket.create_connection((self._worker.store_host, self._worker.store_port), timeout=1).close()
                return
            time.sleep(0.2)
        agent = os.getppid()
        kinship.outlive_parent()
        os.kill(agent, signal.SIGTERM)
        time.sleep(AGENT_GRACE_S)
        if os.getppid() == agent:
            os.kill(agent, signal.SIGKILL)


def _logs(config: Config, mine: Sequence[ProcessPlan], hosts: Sequence[Host]) -> dict[str, Path]:
    where = {p.name: f"{hosts[p.host].name} {p.name}" if len(hosts) > 1 else p.name for p in mine}
    return {where[p.name]: config.run_folder / "logs" / f"{p.name}.log" for p in mine}


def _slot_name(hosts: Sequence[Host], seat: tuple[int, int]) -> str:
    host = hosts[seat[0]]
    return f"host {host.name}" + (f" (slot {seat[1]})" if host.slots > 1 else "")


def _network_namespace() -> str:
    """Two network namespaces of one machine do not share loopback."""
    return os.readlink("/proc/self/ns/net")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("launch/main.py", description="One slot of a run, started by torchrun.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file")
    parser.add_argument("--roles", metavar="ROLE=N,...", help="processes, e.g. trainer=2,engine=2,env=4")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="go on from the run folder's newest checkpoint")
    start.add_argument("--overwrite", action="store_true", help="replace the run that the run folder holds")
    start.add_argument(
        "--continue", action="store_true", dest="go_on", help="go on where the run folder holds a run, else start one"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the file")
    return parser.parse_args(arguments)


def run_slot(arguments: Sequence[str], display: ProgressDisplay) -> tuple[int, bool]:
    """Exit code, and whether starting again would end the same way. Raises FlashflowError."""
    options = _options(arguments)
    worker = Worker.read(os.environ)
    config = load_config(options.config, [*options.overrides, *role_overrides(options.roles)])
    if config.run.runtime == "in_process":
        raise ConfigError(["run.runtime: in_process has no slots; use flashflow train, or processes"])
    kinship.die_with(os.getppid(), signal.SIGTERM)
    slot = Slot(worker, config, options, display)
    return slot.run(), slot.verdict is not None


def main() -> None:
    """Mistakes are printed by one slot of each node, in the first attempt only."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # reward modules beside the config are found here as they are in role processes
    leads_node = os.environ.get("LOCAL_RANK", "0") == "0"
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    try:
        with ProgressDisplay() as display:
            code, final = run_slot(sys.argv[1:], display)
    except ConfigError as error:
        if leads_node and first:
            count = len(error.mistakes)
            lines = [f"flashflow: {count} mistake{'s' if count > 1 else ''} in the config; nothing was started"]
            print("\n".join([*lines, *(f"  {mistake}" for mistake in error.mistakes)]), file=sys.stderr)
        code, final = 2, True
    except FlashflowError as error:
        print(f"flashflow: {error}", file=sys.stderr)
        code, final = 1, False
    sys.stdout.flush()
    sys.stderr.flush()
    if final and leads_node:
        tell_verdict(code)
    os._exit(code)  # the store's thread may hang in a socket


if __name__ == "__main__":
    main()
