"""A Slurm of two nodes on this machine: the daemons of Debian's slurm-wlm, started for a test."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

NODES = 2
_TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "unshare")
_START_SECONDS = 60
# Of root alone in many a PATH.
_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])

# Otherwise MPICH would use this machine's shared memory between the nodes, and Open MPI would wait
# without giving its core away.
_BETWEEN_NODES = {"UCX_TLS": "tcp,self", "OMPI_MCA_mpi_yield_when_idle": "1"}

_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=60
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
_NODE = "NodeName=node{number} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"


def why_not():
    """Why Slurm can't be started here; None where it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} of Slurm is not installed (apt-get install slurm-wlm)"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


@contextmanager
def slurm(cpus=2):
    """Start it; yields the environment variables by which its commands find it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        variables = {"SLURM_CONF": str(folder / "slurm.conf"), **_BETWEEN_NODES}
        _configure(folder, cpus)
        key, munge = folder / "munge.key", folder / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        # All in the foreground, so that they are children that can be ended.
        options = [f"--key-file={key}", f"--socket={munge}", f"--pid-file={folder}/munge.pid"]
        options += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
        _start(stack, ["munged", "--foreground", "--force", *options], variables)
        _await(munge.exists, folder)
        _start(stack, ["slurmctld", "-D"], variables)
        for number in range(NODES):
            # With a host name of its own, by which PMIx recognizes the processes of a node.
            script = f"hostname node{number} && exec slurmd -D -N node{number}"
            _start(stack, ["unshare", "--uts", "sh", "-c", script], variables)
        _await(lambda: _all_idle(variables), folder)
        yield variables


def _configure(folder, cpus):
    host = socket.gethostname()
    controller, *ports = _free_ports(1 + NODES)
    nodes = [_NODE.format(number=number, port=port, cpus=cpus) for number, port in enumerate(ports)]
    text = _CONFIGURATION.format(
        host=host, folder=folder, controller=controller, nodes="\n".join(nodes)
    )
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    # A plugin of its own for control groups, which containers often lack.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")
    for name in ("state", *(f"tmp-node{number}" for number in range(NODES))):
        (folder / name).mkdir()


def _free_ports(count):
    with ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]


def _start(stack, command, variables):
    process = subprocess.Popen(
        command,
        env=os.environ | variables | {"PATH": _PATH},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)


def _all_idle(variables):
    ended = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stdout.split() == ["idle"] * NODES


def _await(condition, folder):
    limit = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > limit:
            logs = [path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log")]
            raise TimeoutError("Slurm did not start: " + "\n".join(logs))
        time.sleep(0.1)
