"""An output that was changed in place: the call is refused before the ranks synchronize."""

import numpy as np
import pytest

LENGTHS = {"small": 3, "large": 20_000}


def read_only(out):
    out.flags.writeable = False


def of_another_dtype(out):
    out.dtype = np.int64


def of_another_shape(out):
    out.shape = (len(out), 1)


CHANGES = [read_only, of_another_dtype, of_another_shape]


class Remembered:
    """A call of each rank with one input and one output, repeated."""

    def __init__(self, comm, name, length, make):
        many, parts = name == "all_reduce_many", comm.size
        self.array = make(comm, length * (parts if name == "reduce_scatter" else 1))
        self.out = make(comm, length * (parts if name == "all_gather" else 1))
        self.array[...] = np.arange(len(self.array)) + comm.rank
        self.lists = [self.array, self.array.copy()], [np.empty_like(self.array), self.out]
        self.call = getattr(comm, name)
        self.many = many

    def make(self):
        if self.many:
            self.call(self.lists[0], out=self.lists[1])
        else:
            self.call(self.array, out=self.out)
        return self.out.copy()

    def due(self, comm):
        totals = comm.size * np.arange(len(self.array)) + comm.size * (comm.size - 1) / 2
        if self.call.__name__ == "reduce_scatter":
            return totals.reshape(comm.size, -1)[comm.rank]
        if self.call.__name__ == "all_gather":
            return np.concatenate([np.arange(len(self.array)) + rank for rank in range(comm.size)])
        return totals


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_many", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.filterwarnings("ignore:Setting the (dtype|shape):DeprecationWarning")
def test_a_changed_output_is_refused_and_the_call_can_be_made_after_all(
    comm, length, name, registered
):
    def make_array(comm, length):
        return comm.empty(length, float) if registered else np.empty(length)

    remembered = Remembered(comm, name, LENGTHS[length], make_array)
    due = remembered.due(comm)
    for _ in range(4):
        np.testing.assert_array_equal(remembered.make(), due)
    out = remembered.out
    for change in CHANGES:
        shape = out.shape
        if comm.rank == 1:
            change(out)
            with pytest.raises((ValueError, TypeError), match=r"read-only|dtype|shape"):
                remembered.make()
            out.flags.writeable = True
            out.dtype = float
            out.shape = shape
        out[...] = 0
        np.testing.assert_array_equal(remembered.make(), due)
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_an_array_to_receive_a_broadcast_in_has_become_read_only(comm):
    for length in LENGTHS.values():
        array = np.empty(length)
        for number in range(3):
            array[...] = comm.rank + number
            assert (comm.broadcast(array, root=0) == number).all()
        array[...] = comm.rank + 7
        if comm.rank == 1:
            array.flags.writeable = False
            with pytest.raises(ValueError, match="read-only"):
                comm.broadcast(array, root=0)
            array.flags.writeable = True
        assert (comm.broadcast(array, root=0) == 7).all()
        # The root's isn't written.
        array.flags.writeable = comm.rank != 0
        assert (comm.broadcast(array, root=0) == 7).all()
