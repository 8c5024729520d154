"""Programs some ranks of which die, while the others go on."""

import sys
import tempfile

from tests.worlds.launcher import find_mpirun, is_open_mpi
from tests.worlds.programs import run_launcher

# Hydra ends a job one of whose processes was killed, most times even where it is told not to: its
# process is this one, which stays until the others are through.
_KEEPER = """
"$@"
echo $? > "$CODES/code $$"
for turn in $(seq 300); do
    [ $(ls "$CODES" | grep -c code) -ge $SIZE ] && exit
    sleep 0.1
done
"""


def launcher_line(size, program, *, deaths):
    """The command that starts the program on so many ranks, of which some may die.

    Where they may, it wants the variables CODES, a directory where each rank's exit code is left,
    and SIZE.
    """
    mpirun, options = find_mpirun(), []
    if is_open_mpi(mpirun):
        options = ["--oversubscribe", *(["--with-ft", "ulfm"] if deaths else [])]
    if deaths:
        program = ["sh", "-c", _KEEPER, "keeper", *program]
    return [mpirun, *options, "-n", str(size), *program]


def run_dying(size, program, directory):
    """Run the text of a program of which ranks die.

    The others leave files as marks in the directory, whose path is MARKS in their environment.
    """
    line = launcher_line(size, [sys.executable, "-c", program], deaths=True)
    with tempfile.TemporaryDirectory() as codes:
        variables = {"MARKS": str(directory), "CODES": codes, "SIZE": str(size)}
        return run_launcher(line, variables, timeout=40)
