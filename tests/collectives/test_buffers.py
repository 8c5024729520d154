"""The pool of buffers."""

import threading
import time
import weakref

import numpy as np

from collectives.messaging.buffers import BufferPool, ReusedArray


def test_no_two_threads_get_one_array(hasty_threads):
    reused, mixed = ReusedArray((4,), np.dtype(np.float32)), []
    limit = time.monotonic() + 1

    def use(number):
        while time.monotonic() < limit and not mixed:
            array = reused.take()
            array[...] = number
            if any((array != number).any() for _ in range(9)):
                mixed.append(number)
            del array

    threads = [threading.Thread(target=use, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mixed


def test_copies_of_many_shapes_take_the_memory_of_those_in_use():
    copies, freed = BufferPool(), []
    for number in range(1, 200):
        pair = [copies.copy(np.full((number, 3), number)), copies.copy(np.arange(number))]
        assert (pair[0] == number).all()
        assert pair[1].tolist() == list(range(number))
        for copied in pair:
            weakref.finalize(copied, freed.append, copied.nbytes)
            copies.give_back(copied)
        del pair, copied
        used = sum(range(1, number + 1)) * 4 * 8 - sum(freed)
        assert used <= number * 4 * 8


def test_an_interrupted_copy_leaves_the_pool_usable():
    copies, array = BufferPool(), np.arange(3)
    copies.give_back(copies.copy(array))
    # Ctrl+C after its first statement.
    copies._free[array.shape, array.dtype].pop()
    for _ in range(2):
        assert copies.copy(array).tolist() == [0, 1, 2]


def test_copies_use_memory_again():
    copies, places = BufferPool(), set()
    for number in range(20):
        taken = [copies.copy(np.full((4, 5), number)) for _ in range(3)]
        places |= {copied.ctypes.data for copied in taken}
        for copied in taken:
            copies.give_back(copied)
    assert len(places) == 3
