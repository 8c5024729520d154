"""Programs some ranks of which may be killed, while the others go on."""

from tests.worlds.launcher import find_mpirun, is_open_mpi

# Hydra ends a job one of whose processes was killed, most times even where it is told not to: its
# process is this one, which stays until the others are through.
_KEEPER = """
"$@"
echo $? > "$MARKS/code $$"
for turn in $(seq 300); do
    [ $(ls "$MARKS" | grep -c code) -ge $SIZE ] && exit
    sleep 0.1
done
"""


def launcher_line(size, program, *, deaths):
    """The command that starts the program on so many ranks, of which some may die.

    Where they may, it wants the variables MARKS (a directory, where each rank's exit code is left)
    and SIZE.
    """
    mpirun, options = find_mpirun(), []
    if is_open_mpi(mpirun):
        options = ["--oversubscribe", *(["--with-ft", "ulfm"] if deaths else [])]
    if deaths:
        program = ["sh", "-c", _KEEPER, "keeper", *program]
    return [mpirun, *options, "-n", str(size), *program]
