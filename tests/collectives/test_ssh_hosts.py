"""The page on several hosts: its commands on two hosts, with an agent in place of ssh."""

import pytest

from tests.worlds import hosts
from tests.worlds.launcher import find_mpirun, is_open_mpi
from tests.worlds.pages import page_of, run_in

REASON = hosts.why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=f"no hosts can be imitated: {REASON}"),
]
FILES, (CHECK, *COMMANDS) = page_of("ssh")


def test_the_commands_of_the_page(tmp_path):
    option = "--host" if is_open_mpi(find_mpirun()) else "-hosts"
    links, train = (command for command in COMMANDS if f"mpirun {option} " in command)
    assert len(COMMANDS) == 4
    with hosts.hosts(2) as (_, agent):
        ended = run_in(
            tmp_path,
            FILES,
            f"{CHECK}\n{links}\n{train}",
            path=[str(agent.parent)],
            prefix=[str(agent), "host1"],
            # Otherwise MPI would use this machine's shared memory between the hosts, and Open MPI
            # wait without giving its core away.
            UCX_TLS="tcp,self",
            OMPI_MCA_mpi_yield_when_idle="1",
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for pair in ("(host1 (node 0) to host2 (node 1))", "(host2 (node 1) to host1 (node 0))"):
        assert pair in ended.stdout
    for rank in range(4):
        assert f"rank {rank} of 4 on node {rank // 2}" in ended.stdout
