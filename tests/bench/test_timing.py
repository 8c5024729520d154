import numpy as np

from bench.timing import Subject, Timing, batch_of, interleave


class LonelyWorld:
    """The part of a communicator that the clock uses."""

    def Barrier(self):  # noqa: N802
        pass

    def allgather(self, value):
        return [value, value + 1]


def test_small_messages_come_in_large_batches():
    assert batch_of(0) == batch_of(8) == 200
    assert batch_of(64 << 10) == 16
    assert batch_of(1 << 20) == batch_of(1 << 30) == 1


def test_subjects_take_turns_and_change_the_order():
    called = []
    subjects = [Subject([(lambda name=name: called.append(name), None)]) for name in "ab"]
    seconds = interleave(subjects, LonelyWorld(), batch=2, warmup=2, repeats=2)
    assert "".join(called) == "bbaa" + "aabb" + "bbaa"
    assert seconds.shape == (2, 2)


def test_the_slowest_rank_counts():
    subject = Subject([(lambda: None, None)])
    assert (interleave([subject], LonelyWorld(), batch=1, warmup=0, repeats=3) >= 1).all()


def test_buffer_sets_take_turns():
    subject = Subject([(lambda: "returned", None), (lambda: None, "written")])
    assert subject.run(1) == "returned"
    assert subject.run(1) == "written"
    assert subject.run(3) == "returned"


def test_statistics():
    assert Timing.of(np.arange(11.0)) == Timing(median=5, minimum=0, p90=9)
