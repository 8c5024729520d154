"""The kernels that pack and unpack, against NumPy."""

import pytest

from collectives.reductions.reduction import ReduceOp
from tests.collectives import oracle
from tests.gpu import programs

pytestmark = pytest.mark.gpu

CASES = [(ReduceOp.SUM, dtype) for dtype in [*oracle.DTYPES, *programs.FLOAT8S]]
CASES += [(ReduceOp.MEAN, dtype) for dtype in oracle.DTYPES if dtype.kind in "biu"]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=[f"{op.value}-{kind}" for op, kind in CASES])
def test_what_is_packed_is_unpacked(gpu, op, dtype, aligned):
    programs.packed(gpu, op, dtype, aligned)
