"""Several hosts on one machine: network namespaces with names of their own, joined by a bridge."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

# Networks for benchmarks of network devices (RFC 2544), which aren't routed.
_NETWORKS = 256
_MADE = itertools.count()
_AUTOGROUP = "kernel.sched_autogroup_enabled"
_CONGESTION_CONTROL = "net.ipv4.tcp_congestion_control"
_TOOLS = ("hostname", "ip", "nsenter", "sysctl", "taskset", "tc", "umount", "unshare")

_AGENT = """#!/bin/sh
# As ssh: options, a host, a command.
while [ "${{1#-}}" != "$1" ]; do shift; done
case "$1" in
{cases}
*) echo "no host $1" >&2; exit 255 ;;
esac
shift
exec taskset -c "$core" ip netns exec "$name" nsenter --uts="{directory}/$name" /bin/sh -c "$*"
"""


def why_not() -> str | None:
    """Why hosts can't be simulated here; None where they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "network namespaces need root"


def _run(*command: str) -> None:
    """RuntimeError with what it has printed, if it fails."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        reason = ended.stderr.strip() or f"exit status {ended.returncode}"
        raise RuntimeError(f"{' '.join(command)}: {reason}")


@contextmanager
def hosts(count: int, names: Sequence[str] | None = None) -> Iterator[tuple[list[str], Path]]:
    """Create so many hosts; yields their addresses and the path of an agent in place of ssh.

    Each has one core, which it shares if there are fewer cores than hosts. Programs on them, and
    the agent, resolve their names: host1, host2, … if none are given. SIGTERM raises SystemExit
    meanwhile, so that they are removed: their network would disturb later ones.
    """
    names = names or [f"host{number}" for number in range(1, count + 1)]
    # A deleted link may exist for a moment: its name is not used again.
    name = f"c{os.getpid()}{chr(ord('a') + next(_MADE) % 26)}"
    bridge = f"{name}b"
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _leave))
        _schedule_as_one_session(stack)
        _run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_run, "ip", "link", "delete", bridge)
        prefix = _unused_prefix()
        _run("ip", "address", "add", f"{_address_here(prefix)}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        addresses = [f"{prefix}.{number}" for number in range(1, count + 1)]
        known = "".join(
            f"{address} {host}\n"
            for address, host in zip(["127.0.0.1", *addresses], ["localhost", *names], strict=True)
        )
        cores, cases = sorted(os.sched_getaffinity(0)), []
        for number, (address, host) in enumerate(zip(addresses, names, strict=True), 1):
            _make(stack, f"{name}{number}", host, f"{address}/24", bridge, Path(directory))
            _name_hosts(stack, f"{name}{number}", known)
            core = cores[(number - 1) % len(cores)]
            cases.append(f"{host}|{address}) name={name}{number} core={core} ;;")
        # Under the name of ssh, so that a PATH with its folder lets every program find it.
        agent = Path(directory) / "ssh"
        text = _AGENT.format(cases="\n".join(cases), directory=directory)
        agent.write_text(text, encoding="utf-8")
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        yield addresses, agent


def _schedule_as_one_session(stack: ExitStack) -> None:
    """Share the cores between tasks, not between sessions, of which each host is one.

    With sched_autogroup (sched(7)), tasks of one host that call sched_yield(2) all the time, as
    MPI does, keep the cores from another one: for 30 s and more on Linux 6.18. Where the kernel
    refuses the setting it stays as it is.
    """
    if _sysctl(_AUTOGROUP) == "1":
        _sysctl(f"{_AUTOGROUP}=0")
        stack.callback(_sysctl, f"{_AUTOGROUP}=1")


def _unused_prefix() -> str:
    """A network that no other simulation uses at the moment."""
    shown = subprocess.run(["ip", "-4", "address"], capture_output=True, text=True, check=True)
    prefixes = (f"198.18.{(os.getpid() + number) % _NETWORKS}" for number in range(_NETWORKS))
    return next(prefix for prefix in prefixes if f" {prefix}." not in shown.stdout)


def _address_here(prefix: str) -> str:
    """The address of this machine in a network of simulated hosts."""
    return f"{prefix}.254"


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _name_hosts(stack: ExitStack, name: str, known: str) -> None:
    """The content of /etc/hosts in a namespace."""
    folder = Path("/etc/netns") / name
    folder.mkdir(parents=True)
    stack.callback(shutil.rmtree, folder)
    (folder / "hosts").write_text(known, encoding="utf-8")


def _make(
    stack: ExitStack, name: str, host: str, address: str, bridge: str, directory: Path
) -> None:
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "delete", name)
    outside, inside = f"{name}o", "eth0"
    link = ("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
    _run(*link)
    _run("ip", "link", "set", outside, "master", bridge, "up")
    _run("ip", "-n", name, "address", "add", address, "dev", inside)
    for device in ("lo", inside):
        _run("ip", "-n", name, "link", "set", device, "up")
    # Where this is refused, the benchmark prints what it is instead.
    _sysctl(f"{_CONGESTION_CONTROL}=reno", name)
    # A namespace's name outlives the process that sets it where a file is bound to it.
    place = directory / name
    place.touch()
    _run("unshare", f"--uts={place}", "hostname", host)
    stack.callback(_run, "umount", str(place))


def _sysctl(setting: str, namespace: str | None = None) -> str:
    """Read or write ("name=value") a setting of the kernel, here or in a network namespace.

    Returns its value, or nothing where the kernel refuses.
    """
    inside = [] if namespace is None else ["ip", "netns", "exec", namespace]
    command = [*inside, "sysctl", "-n", setting]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def congestion_control(agent: Path, address: str) -> str:
    """TCP's algorithm on a host.

    Every kernel lets a namespace use Reno. With an algorithm that estimates the rate of a link, as
    BBR, a benchmark would measure how well it does.
    """
    return _sysctl(_CONGESTION_CONTROL, namespace_of(agent, address)) or "unknown"


def namespace_of(agent: Path, address: str) -> str:
    """The network namespace of a host."""
    found = re.search(rf"\|{re.escape(address)}\) name=(\S+)", agent.read_text())
    assert found is not None
    return found[1]


def shape(agent: Path, addresses: Sequence[str], rate: str) -> None:
    """Limit what every host sends, by a token bucket (tc-tbf(8)); "1gbit" for example."""
    for address in addresses:
        limits = ("tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
        device = ("qdisc", "replace", "dev", "eth0", "root")
        _run("tc", "-n", namespace_of(agent, address), *device, *limits)


@cache
def find_mpirun() -> str | None:
    """The mpirun beside this Python, or in PATH."""
    own = Path(sys.executable).with_name("mpirun")
    return str(own) if own.exists() else shutil.which("mpirun")


@cache
def is_open_mpi(mpirun: str) -> bool:
    """Whether an mpirun is Open MPI's."""
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in version.stdout


def launch_line(
    mpirun: str, agent: Path, addresses: Sequence[str], ranks: Sequence[int]
) -> tuple[list[str], dict[str, str]]:
    """The command that starts `ranks[i]` ranks on host i, to be continued, and its environment."""
    places = ",".join(f"{address}:{count}" for address, count in zip(addresses, ranks, strict=True))
    if is_open_mpi(mpirun):
        options = ["--prtemca", "plm_ssh_agent", str(agent), "-H", places]
        options += ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        environment = {}
    else:
        here = _address_here(addresses[0].rpartition(".")[0])
        options = ["-localhost", here, "-launcher", "ssh", "-launcher-exec", str(agent)]
        options += ["-hosts", places]
        # Without it, UCX would use this machine's shared memory between the hosts.
        environment = {"UCX_TLS": "tcp,self"}
    return [mpirun, *options, "-n", str(sum(ranks))], environment
