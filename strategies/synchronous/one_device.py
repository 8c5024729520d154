"""OneDeviceStrategy: one replica on one device, for tests of a program written for a strategy."""

from __future__ import annotations

from collectives import BackendUnavailableError, Communicator
from collectives.transports.local import alone
from strategies.base.strategy import Strategy
from strategies.core.device_names import gpu_problem, parse_device, use_gpu
from strategies.core.world import world_of


class OneDeviceStrategy(Strategy):
    """One replica, on the device named, such as "/cpu:0". Variables are plain, on the host.

    As `tf.distribute.OneDeviceStrategy`. It needs no MPI: under `mpirun` with several ranks, each
    rank is alone and trains by itself; a `communicator` is taken as by every strategy, and not
    used. A GPU becomes the current one. Raises ValueError for anything else than a device's name,
    BackendUnavailableError for a GPU where there is none.
    """

    mirrors_variables = False

    def __init__(self, device: str, *, communicator: Communicator | None = None) -> None:
        kind, number = parse_device(device)
        if kind == "GPU":
            problem = gpu_problem(number)
            if problem is not None:
                raise BackendUnavailableError(f"OneDeviceStrategy({device!r}): {problem}")
            use_gpu(number)
        if communicator is not None:
            world_of(communicator)
        super().__init__(Communicator(alone()))
        self.device = f"/device:{kind}:{number}"
