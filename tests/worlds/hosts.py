"""Several hosts on one machine: network namespaces with names of their own, joined by a bridge."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.worlds.launcher import find_mpirun, is_open_mpi
from tests.worlds.programs import run_launcher

# A documentation network (RFC 5737), which isn't routed.
_PREFIX = "198.51.100"
_ROOT_ADDRESS = f"{_PREFIX}.254"
_TOOLS = ("ip", "nsenter", "unshare")

_AGENT = """#!/bin/sh
# As ssh: options, a host, a command.
while [ "${{1#-}}" != "$1" ]; do shift; done
host="$1"
shift
name="{name}${{host##*.}}"
exec ip netns exec "$name" nsenter --uts="{directory}/$name" /bin/sh -c "$*"
"""


def why_not():
    """Why hosts can't be simulated here; None where they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "network namespaces need root"


def _run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextmanager
def hosts(count):
    """Create so many hosts; yields their addresses and the path of an agent in place of ssh."""
    name = f"c{os.getpid()}h"
    bridge = f"{name}b"
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        _run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_run, "ip", "link", "delete", bridge)
        _run("ip", "address", "add", f"{_ROOT_ADDRESS}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for number in range(1, count + 1):
            _make(stack, f"{name}{number}", f"{_PREFIX}.{number}/24", bridge, Path(directory))
        agent = Path(directory) / "agent.sh"
        agent.write_text(_AGENT.format(name=name, directory=directory), encoding="utf-8")
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        yield [f"{_PREFIX}.{number}" for number in range(1, count + 1)], agent


def _make(stack, name, address, bridge, directory):
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "delete", name)
    outside, inside = f"{name}o", "eth0"
    link = ("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
    _run(*link)
    _run("ip", "link", "set", outside, "master", bridge, "up")
    _run("ip", "-n", name, "address", "add", address, "dev", inside)
    for device in ("lo", inside):
        _run("ip", "-n", name, "link", "set", device, "up")
    # A namespace's name outlives the process that sets it where a file is bound to it.
    place = directory / name
    place.touch()
    _run("unshare", f"--uts={place}", "hostname", name)
    stack.callback(_run, "umount", str(place))


def run_on_hosts(addresses, agent, ranks, program, *, timeout):
    """Run a Python program on `ranks[i]` ranks of host i."""
    mpirun, size = find_mpirun(), sum(ranks)
    places = ",".join(f"{address}:{count}" for address, count in zip(addresses, ranks, strict=True))
    if is_open_mpi(mpirun):
        options = ["--prtemca", "plm_ssh_agent", str(agent), "-H", places]
        options += ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        environment = {}
    else:
        options = ["-localhost", _ROOT_ADDRESS, "-launcher", "ssh", "-launcher-exec", str(agent)]
        options += ["-hosts", places]
        # Without it, UCX would use this machine's shared memory between the hosts.
        environment = {"UCX_TLS": "tcp,self"}
    line = [mpirun, *options, "-n", str(size), sys.executable, "-c", program]
    return run_launcher(line, environment, timeout=timeout)
