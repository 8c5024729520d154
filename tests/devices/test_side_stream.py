"""A stream in addition to the caller's."""

from contextlib import nullcontext

import numpy as np
import pytest

from collectives.gpu.stream_work import SideStream
from tests.devices.gpu_worlds import simulated
from tests.devices.simulated_arrays import plain


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_stream_waits_for_what_was_begun_and_it_is_held(fails):
    with simulated() as (gpus, _):
        gpus.be_rank(0)
        side = SideStream(gpus)
        array = gpus.from_host(np.zeros(3))
        expected = pytest.raises(ZeroDivisionError) if fails else nullcontext()
        with expected, side.work(array, None):
            gpus.slow(side.stream, 0.2)
            gpus.put(side.stream, lambda: plain(array).fill(7))
            if fails:
                raise ZeroDivisionError
        assert [used[0] is array for _, used in side._held] == [True]
        assert array.get().tolist() == [7, 7, 7]
        with side.work():
            pass
        assert [used for _, used in side._held] == [()], "what is done is let go"
