"""A real Slurm of three virtual nodes on this machine: munged, slurmctld and a slurmd per node, in a folder of its own.

As root, without systemd; /etc is not touched. Nodes are processes on loopback addresses 127.0.1.k.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
WAIT_S = 60
NODE = "ffn"


def install() -> None:
    """Skips, saying why, where Slurm is not and cannot be installed."""
    if all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "munged"))):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("NOT TESTED: Slurm is not installed, and only root on Debian can install it here")
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            pytest.skip(f"NOT TESTED: Slurm cannot be installed: {' '.join(command)}: {done.stderr[-300:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Slurm:
    def __init__(self, folder: Path, *, nodes: int = 3, cpus: int = 2) -> None:
        self.folder = folder
        self.nodes = [f"{NODE}{number}" for number in range(1, nodes + 1)]
        self._conf = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self._conf)}
        self._pids: dict[str, int] = {}
        for name in ("munge", "state", "log"):
            (folder / name).mkdir()
        os.chmod(folder, 0o755)
        os.chmod(folder / "munge", 0o711)
        self._conf.write_text(self._configuration(cpus))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self._start_munge()
        self._daemon("slurmctld", ["slurmctld", "-c", "-f", str(self._conf)])
        for node in self.nodes:
            self.start_node(node)
        self.until(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(nodes), "idle nodes")

    def _configuration(self, cpus: int) -> str:
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.1.{number} Port={free_port()} CPUs={cpus} "
            "RealMemory=4000 State=UNKNOWN"
            for number, node in enumerate(self.nodes, start=1)
        )
        return f"""\
ClusterName=flashflow
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_min_interval=0,bf_min_age_reserve=0
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=10
MinJobAge=600
SlurmdTimeout=15
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/log/%n.log
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=all Nodes={NODE}[1-{len(self.nodes)}] Default=YES MaxTime=INFINITE State=UP
"""

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"key-file": key, "socket": folder / "sock", "pid-file": folder / "pid", "seed-file": folder / "seed"}
        options = [f"--{name}={path}" for name, path in files.items()]
        subprocess.run(["munged", "--force", *options, f"--log-file={folder}/log"], check=True)
        self._pids["munged"] = int((folder / "pid").read_text())

    def _daemon(self, name: str, command: list[str]) -> None:
        pid_file = self.folder / f"{name}.pid"
        pid_file.unlink(missing_ok=True)
        subprocess.run(command, check=True, env=self.environment)
        self.until(lambda: pid_file.exists() and pid_file.read_text().strip().isdecimal(), f"{name} to start")
        self._pids[name] = int(pid_file.read_text())

    def start_node(self, node: str) -> None:
        (self.folder / f"spool.{node}").mkdir(exist_ok=True)
        self._daemon(node, ["slurmd", "-f", str(self._conf), "-N", node])

    def kill_node(self, node: str) -> None:
        """The daemon only; Slurm takes the node for lost."""
        os.kill(self._pids[node], signal.SIGKILL)

    def run(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env={**self.environment, **environment}, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def until(self, true, what: str, seconds: float = WAIT_S) -> None:
        ends = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < ends, f"waited {seconds} s for {what}"
            time.sleep(0.1)

    def state(self, job: str) -> dict[str, str]:
        """Fields of `scontrol show job`, of the first component."""
        text = self.run("scontrol", "-o", "show", "job", job).splitlines()[0]
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, job: str, output: Path, *, state: str = "COMPLETED", seconds: float = 400) -> dict[str, str]:
        """Until the job has ended; its fields."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        ends = time.monotonic() + seconds
        while (found := self.state(job))["JobState"] not in over:
            assert time.monotonic() < ends, f"{found}\n{output.read_text() if output.exists() else ''}"
            time.sleep(0.2)
        assert found["JobState"] == state, f"{found}\n{output.read_text() if output.exists() else ''}"
        return found

    def close(self) -> None:
        subprocess.run(["scancel", "--user=root"], env=self.environment, timeout=30, check=False)
        for name in [*self.nodes, "slurmctld", "munged"]:
            pid = self._pids.get(name)
            if pid is None:
                continue
            try:
                os.kill(pid, signal.SIGTERM)
                self.until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"{name} to end", 20)
            except (ProcessLookupError, AssertionError):
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, signal.SIGKILL)
