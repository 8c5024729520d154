#!/bin/sh
# The launcher waits until the cluster's DNS has the names of all workers: mpirun does not.
set -eu
hostfile="${MPI_HOSTFILE:-/etc/mpi/hostfile}"
if [ "${K_MPI_JOB_ROLE:-}" = launcher ]; then
    for host in $(sed 's/[: ].*//' "$hostfile"); do
        tries=0
        until getent hosts "$host" > /dev/null; do
            tries=$((tries + 1))
            if [ "$tries" -gt 60 ]; then
                echo "no address of $host after 60 s" >&2
                exit 1
            fi
            sleep 1
        done
    done
fi
exec "$@"
