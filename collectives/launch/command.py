"""The command line: start MPI together with the other tasks, then run the program as this rank."""

from __future__ import annotations

import argparse
import io
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import is_zipfile

from collectives.consistency.uncaught import end_the_job_on_exceptions
from collectives.errors import CollectiveError, DeadlineExceededError
from collectives.launch.task_client import TaskClient
from collectives.launch.task_server import TaskServer
from collectives.launch.tasks import SECRET, Tasks
from collectives.launching.launcher import started_by_mpi
from collectives.launching.library import load
from collectives.launching.start import load_mpich, start_mpi, start_through
from collectives.waiting.command_line import parse_seconds
from collectives.waiting.wait_policy import DEFAULT_DEADLINE

# From `docker stop` and the like.
_PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
)


def main(
    module: str,
    find_tasks: Callable[[Mapping[str, str]], Tasks],
    environment: Mapping[str, str],
    arguments: Sequence[str] | None = None,
) -> str | None:
    """Run the program as a rank; returns the error if the ranks can't be started."""
    _open_standard_streams()
    parser = _parser(module)
    options = parser.parse_args(arguments)
    # argparse leaves it there.
    del options.program[: options.program[:1] == ["--"]]
    if not options.program:
        parser.error("which program?")
    if not options.as_module and not Path(options.program[0]).exists():
        parser.error(f"there is no file {options.program[0]}")
    try:
        # mpirun's ranks need no tasks.
        if started_by_mpi(environment):
            mpi = start_mpi()
        else:
            mpi = _start(find_tasks(environment), environment.get(SECRET, ""), options)
    except (CollectiveError, ValueError, TypeError) as error:
        return f"python -m {module}: {error}"
    if mpi.COMM_WORLD.size > 1:
        end_the_job_on_exceptions(mpi)
    _run(options.program, as_module=options.as_module)
    return None


def _open_standard_streams() -> None:
    """Open the descriptors 0 to 2 that are closed, so that no connection gets one of them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _become_child() -> None:
    """Go on in a child of this process, which passes signals on and has the child's exit status.

    The kernel does not kill process 1 of a container, as it must where another rank has ended.
    """

    def pass_on(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child == 0:
        _lead_group()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return
    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    ended = 0
    while ended != child:  # orphans, too
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _lead_group() -> None:
    """Be the process group that a terminal signals, so that no signal arrives twice."""
    os.setpgid(0, 0)
    if os.isatty(0):
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        with suppress(OSError):  # a terminal that doesn't control this session
            os.tcsetpgrp(0, os.getpgrp())
        signal.signal(signal.SIGTTOU, before)


def _start(tasks: Tasks, secret: str, options: argparse.Namespace) -> Any:
    """The `mpi4py.MPI` module, initialized as the task's rank."""
    if tasks.size == 1:
        return load()
    if os.getpid() == 1:
        _become_child()
    load_mpich(tasks.size)
    seconds, insecure = options.timeout, options.insecure
    if tasks.rank == 0:
        with closing(TaskServer(tasks, secret, insecure=insecure)) as server:
            try:
                return start_through(
                    server, 0, tasks.size, seconds, names=tasks.names, listening=server
                )
            except DeadlineExceededError as error:
                raise DeadlineExceededError(f"{error}{server.hints}", error.absent) from error
    with closing(TaskClient(tasks, secret, seconds, insecure=insecure)) as client:
        return start_through(client, tasks.rank, tasks.size, seconds, names=tasks.names)


def _run(program: list[str], *, as_module: bool) -> None:
    """Run it as `python PROGRAM` or `python -m MODULE` does, in this process."""
    sys.argv[:] = program
    path = program[0]
    # It stays the main module when the program has ended: functions of `atexit` may pickle objects
    # of its classes. runpy's public functions, which serve compiled files alone here, replace it
    # for the time of the run.
    module = sys.modules["__main__"] = ModuleType("__main__")
    run_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # Python's own -m
    if as_module:
        run_as_main(path)
        return
    if os.path.isdir(path) or is_zipfile(path):
        _put_first(path)
        run_as_main("__main__", alter_argv=False)
        return
    if not getattr(sys.flags, "safe_path", False):
        _put_first(str(Path(path).resolve().parent))
    if path.endswith(".pyc"):
        runpy.run_path(path, run_name="__main__")
        return
    # Absolute, as Python's own: the program may change the working directory.
    path = module.__file__ = os.path.abspath(path)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(module))


def _put_first(folder: str) -> None:
    """Into sys.path, in place of the working directory.

    `python -P` leaves that out, and every Python one that no longer exists.
    """
    try:
        first = not getattr(sys.flags, "safe_path", False) and sys.path[0] == os.getcwd()
    except OSError:
        first = False
    sys.path[:first] = [folder]


def _parser(module: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description="Become one rank of a world whose processes an orchestrator has started, and"
        " run a program. The first task serves the start at its own address.",
    )
    parser.add_argument(
        "--timeout",
        type=parse_seconds,
        default=DEFAULT_DEADLINE,
        metavar="SECONDS",
        help="how long to wait for the other tasks (default: %(default)g)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help=f"allow other addresses than loopback without {SECRET}",
    )
    parser.add_argument("-m", dest="as_module", action="store_true", help="the program is a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...")
    return parser
