"""Programs of which some ranks die while the others continue."""

import sys
import tempfile

from tests.worlds.launcher import find_mpirun, is_open_mpi
from tests.worlds.programs import run_launcher

# Hydra ends a job when one of its processes was killed, usually even with the option against it:
# its process is this one, which waits for the end of the others.
_KEEPER = """
"$@"
echo $? > "$CODES/code $$"
for turn in $(seq 300); do
    [ $(ls "$CODES" | grep -c code) -ge $SIZE ] && exit
    sleep 0.1
done
"""


def launcher_line(size, program, *, deaths):
    """The command that starts the program on so many ranks, some of which may die.

    Where they may, it needs the variables CODES, a directory for each rank's exit code,
    and SIZE.
    """
    mpirun, options = find_mpirun(), []
    if is_open_mpi(mpirun):
        options = ["--oversubscribe", *(["--with-ft", "ulfm"] if deaths else [])]
    if deaths:
        program = ["sh", "-c", _KEEPER, "keeper", *program]
    return [mpirun, *options, "-n", str(size), *program]


def run_dying(size, program, directory):
    """Run a program's text of which some ranks die.

    The others write files as marks into the directory of the environment variable MARKS.
    """
    line = launcher_line(size, [sys.executable, "-c", program], deaths=True)
    with tempfile.TemporaryDirectory() as codes:
        variables = {"MARKS": str(directory), "CODES": codes, "SIZE": str(size)}
        return run_launcher(line, variables, timeout=40)
