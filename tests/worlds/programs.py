"""Run an ordinary program on a world of ranks, as a user does."""

import os
import re
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

from tests.worlds.cleanup import (
    describe_tagged,
    end_group,
    find_segments,
    kill_tagged,
    remove_segments,
)
from tests.worlds.launcher import (
    DIRECTORY_VARIABLE,
    NO_MPIRUN,
    find_mpirun,
    is_open_mpi,
    world_environment,
)

ROOT = Path(__file__).parents[2]


def errors_of(ended):
    """A program's stderr, without the reports of slow ranks of a busy machine, and of forks."""
    late, fork = r".* has waited .* for ", r".*: This process .* is multi-threaded, use of fork\(\)"
    # Python 3.13 shows the line of `python -c`, too.
    text = rf"^({late}.*\n|{fork}.*\n( .*\n)?)"
    return re.sub(text, "", ended.stderr, flags=re.MULTILINE)


def run_program(size, command, *, timeout):
    """Run a command on `size` ranks; AssertionError where it does not end in time."""
    return run_programs([(size, command)], timeout=timeout)


def run_programs(parts, *, timeout, options=(), prefix=()):
    """Run several commands as one world: each (number of ranks, command) in turn.

    `options` are mpirun's; `prefix` is a command that runs mpirun.
    """
    mpirun = find_mpirun()
    assert mpirun, NO_MPIRUN
    line = [*prefix, mpirun, *(["--oversubscribe"] if is_open_mpi(mpirun) else []), *options]
    for number, (size, command) in enumerate(parts):
        line += [*([":"] if number else []), "-n", str(size), *command]
    return run_launcher(line, {}, timeout=timeout)


@contextmanager
def launched(line, environment, **streams):
    """Start mpirun's command line, with more environment variables; end it and clean up after it.

    `streams` are Popen's.
    """
    segments = find_segments()
    with tempfile.TemporaryDirectory() as directory:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = world_environment(directory) | {"PYTHONPATH": path} | environment
        with subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            text=True,
            env=variables,
            start_new_session=True,
            **streams,
        ) as process:
            try:
                yield process
            except subprocess.TimeoutExpired as late:
                # pytest shortens what the exception holds.
                written = [
                    (stream or b"").decode(errors="replace")
                    for stream in (late.output, late.stderr)
                ]
                raise AssertionError(
                    f"the job was not at its end after {late.timeout:g} s:\n"
                    f"{describe_tagged(DIRECTORY_VARIABLE, directory)}\n"
                    "stdout:\n{}\nstderr:\n{}".format(*written)
                ) from None
            finally:
                end_group(process)
                kill_tagged(DIRECTORY_VARIABLE, directory)
                remove_segments(segments)


def run_launcher(line, environment, *, timeout):
    """Run mpirun's command line, with more environment variables, and clean up after it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with launched(line, environment, **pipes) as process:
        output, errors = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(line, process.returncode, output, errors)
