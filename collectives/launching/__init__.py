"""The start of MPI: the launcher's variables, and a start without a launcher of MPI."""
