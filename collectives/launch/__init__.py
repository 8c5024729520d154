"""`python -m collectives.launch`: ranks that an orchestrator has started, without mpirun."""
