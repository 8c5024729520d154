"""Datasets are split as TensorFlow splits them, and all ranks end together."""

import functools
import operator

import numpy as np
import pytest

import strategies
from collectives import MismatchError

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2),
    pytest.mark.timeout_seconds(300),
    # Of TensorFlow's own distributed datasets in a function.
    pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options"),
]


def rows(strategy, distributed):
    """This rank's rows of each step."""
    steps = [strategy.experimental_local_results(each)[0] for each in distributed]
    return [each.numpy().tolist() for each in steps]


def with_policy(tf, dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def test_global_batches_are_split(tf, strategy, comm):
    dataset = tf.data.Dataset.range(14).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)
    for _ in range(2):
        steps = comm.all_gather_object(rows(strategy, distributed))
        joined = [functools.reduce(operator.iadd, parts, []) for parts in zip(*steps, strict=True)]
        assert joined == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
        lengths = [len(each[0]) for each in steps]
        assert lengths == ([2, 2] if comm.size == 2 else [2, 2, 0])
    spec = distributed.element_spec

    @tf.function(input_signature=[spec])
    def total(batch):
        value = strategy.run(lambda each: tf.reduce_sum(each), args=(batch,))
        return strategy.reduce("SUM", value, axis=None)

    assert [int(total(each)) for each in distributed] == [6, 22, 38, 25]


def test_iterators_are_of_the_host(tf, strategy):
    """MultiDeviceIterator's thread may use a dataset that is freed: SIGSEGV."""
    dataset = tf.data.Dataset.range(8).batch(4)
    placed = tf.distribute.InputOptions(experimental_fetch_to_device=True)
    for distributed in (
        strategy.experimental_distribute_dataset(dataset),
        strategy.experimental_distribute_dataset(dataset, placed),
        strategy.distribute_datasets_from_function(lambda context: dataset),
    ):
        (of_this_worker,) = iter(distributed)._iterators
        assert type(of_this_worker._iterator).__name__ == "OwnedIterator"


def test_the_policies(tf, strategy, comm):
    policies = tf.data.experimental.AutoShardPolicy
    dataset = tf.data.Dataset.range(12).batch(6)
    for policy, steps in ((policies.DATA, 2), (policies.OFF, 2 * comm.size)):
        distributed = strategy.experimental_distribute_dataset(with_policy(tf, dataset, policy))
        found = comm.all_gather_object(rows(strategy, distributed))
        assert [len(each) for each in found] == [steps] * comm.size
        whole = [row for parts in zip(*found, strict=True) for each in parts for row in each]
        times = comm.size if policy is policies.OFF else 1
        assert sorted(whole) == sorted([*range(12)] * times)
    if comm.size > 1:
        # Rows would be repeated, and others lost.
        odd = with_policy(tf, dataset, policies.OFF if comm.rank == 1 else policies.DATA)
        with pytest.raises(MismatchError, match=r"AutoShardPolicy\.OFF"):
            strategy.experimental_distribute_dataset(odd)
    table = tf.data.experimental.CsvDataset(["absent.csv"], [tf.int64])
    for given in (dataset, table.batch(2)):
        with pytest.raises(ValueError, match=r"aren't files which TensorFlow splits, as TFRecord"):
            strategy.experimental_distribute_dataset(with_policy(tf, given, policies.FILE))


def test_files(tf, strategy, comm, folder):
    if comm.rank == 0:
        for number in range(comm.size):
            (folder / f"{number}.txt").write_text(f"{number}0\n{number}1\n")
    comm.barrier()
    names = sorted(map(str, folder.glob("*.txt")))

    def numbers(names):
        lines = tf.data.TextLineDataset(names)
        return lines.map(lambda line: tf.strings.to_number(line, tf.int64)).batch(comm.size)

    distributed = strategy.experimental_distribute_dataset(numbers(names))
    found = functools.reduce(operator.iadd, rows(strategy, distributed), [])
    assert found == [10 * comm.rank, 10 * comm.rank + 1]
    # Fewer files than ranks: AUTO follows DATA.
    distributed = strategy.experimental_distribute_dataset(numbers(names[:1]))
    found = comm.all_gather_object(functools.reduce(operator.iadd, rows(strategy, distributed), []))
    assert sorted(functools.reduce(operator.iadd, found, [])) == [0, 1]


def test_lists_of_files_that_are_cut(tf, strategy, comm, folder):
    """AUTO counts what is left before the files are read: fewer than ranks follow DATA."""
    if comm.rank == 0:
        for number in range(4):
            (folder / f"{number}.txt").write_text(f"{number}0\n{number}1\n")
    comm.barrier()
    read = tf.data.TextLineDataset
    files = tf.data.Dataset.list_files(str(folder / "*.txt"), shuffle=False)
    only_3 = files.filter(lambda name: tf.strings.regex_full_match(name, ".*3.txt"))
    file = tf.data.experimental.AutoShardPolicy.FILE
    every = files.filter(lambda name: True)
    for lines, read_from, split in (
        (files.take(1).interleave(read), [0], False),
        (files.skip(3).flat_map(read), [3], False),
        (only_3.flat_map(lambda name: read(name).map(tf.strings.strip)), [3], False),
        (files.batch(4).flat_map(read), [0, 1, 2, 3], False),
        (read(files.take(1)), [0], False),
        (files.interleave(read), [0, 1, 2, 3], True),
        (every.flat_map(read), [0, 1, 2, 3], False),
        (files.repeat().flat_map(read).take(8 // comm.size), [0, 1, 2, 3], True),
        (files.take(1).repeat().flat_map(read).take(2), [0], False),
    ):
        batches = lines.map(tf.strings.to_number).batch(2)
        distributed = strategy.experimental_distribute_dataset(batches)
        found = comm.all_gather_object(
            functools.reduce(operator.iadd, rows(strategy, distributed), [])
        )
        whole = sorted(row for each in found for row in each)
        assert whole == [10 * file + row for file in read_from for row in range(2)]
        files_here = {row // 10 for row in found[comm.rank]}
        assert (files_here == set(range(comm.rank, 4, comm.size))) == split
    with pytest.raises(ValueError, match=f"has 1 files: must have at least {comm.size}"):
        strategy.experimental_distribute_dataset(
            with_policy(tf, files.take(1).interleave(read).batch(2), file)
        )


def test_a_number_of_batches_that_files_do_not_have(tf, strategy, comm, folder):
    """TensorFlow counts those of `take`, of all ranks together: each rank's files give others."""
    if comm.rank == 0:
        for number in range(comm.size):
            (folder / f"{number}.txt").write_text("1\n2\n3\n4\n" if number else "")
    comm.barrier()
    lines = tf.data.TextLineDataset([str(folder / f"{n}.txt") for n in range(comm.size)])
    batches = lines.map(tf.strings.to_number).repeat().take(8).batch(3 * comm.size // 2)
    steps = 0
    for _ in strategy.experimental_distribute_dataset(batches):
        assert float(strategy.reduce("SUM", tf.constant(1.0), axis=None)) == comm.size
        steps += 1
    assert steps > 0


def test_batches_are_split_in_one_order(tf, strategy, comm, caplog):
    """Without it each rank would take its parts of other batches."""
    dataset = tf.data.Dataset.range(8).batch(4)
    options = tf.data.Options()
    options.deterministic = False
    distributed = strategy.experimental_distribute_dataset(dataset.with_options(options))
    assert distributed._original_dataset.options().deterministic
    assert "a step with" not in caplog.text
    free = tf.data.Dataset.range(8).map(lambda x: x, num_parallel_calls=2, deterministic=False)
    strategy.experimental_distribute_dataset(free.batch(4))
    assert "has a step with deterministic=False" in caplog.text


def test_ranks_that_shuffle_by_different_seeds(tf, strategy, comm, caplog, folder):
    """A rank that has drawn a random number alone gives the next dataset another seed."""

    def distributed(seed=None):
        caplog.clear()
        dataset = tf.data.Dataset.range(12).shuffle(12, seed).repeat(2).batch(4)
        made = strategy.experimental_distribute_dataset(dataset)
        return np.concatenate([part for batch in made for part in [batch.values[0].numpy()]])

    def rows(seed=None):
        return np.sort(np.concatenate(comm.all_gather_object(distributed(seed)))).tolist()

    whole = sorted([*range(12)] * 2)
    assert rows() == whole
    assert "seed" not in caplog.text
    if comm.rank:
        tf.random.normal(())
    distributed()
    assert ("shuffle by different seeds" in caplog.text) == (comm.rank == 0)
    assert rows(seed=7) == whole
    # Random data, and files that each rank has read, may differ.
    noise = tf.data.Dataset.random(seed=comm.rank + 1).map(lambda x: tf.cast(x % 2, tf.int64))
    data = tf.data.Dataset.zip((tf.data.Dataset.range(12), noise)).batch(4)
    strategy.experimental_distribute_dataset(data)
    files = [str(folder / f"{number}.tfrecord") for number in range(comm.size)]
    if comm.rank == 0:
        for name in files:
            with tf.io.TFRecordWriter(name) as writer:
                writer.write(b"row")
    comm.barrier()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    read = tf.data.TFRecordDataset(files).shuffle(8, seed=comm.rank + 1).batch(2)
    strategy.experimental_distribute_dataset(read.with_options(options))
    assert "seed" not in caplog.text
    shuffled = tf.data.Dataset.from_tensor_slices(files).shuffle(8, seed=comm.rank + 1)
    read = tf.data.TFRecordDataset(shuffled).batch(2).with_options(options)
    strategy.experimental_distribute_dataset(read)
    assert ("different seeds" in caplog.text) == (comm.rank == 0)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_files_beside_other_sources(tf, strategy, comm, folder):
    """Rows stay paired, and in the order of one process in `predict`."""
    policies, count = tf.data.experimental.AutoShardPolicy, 2 * comm.size
    if comm.rank == 0:
        for number in range(count):
            lines = range(3 * number, 3 * number + 3)
            (folder / f"{number}.txt").write_text("".join(f"{each}\n" for each in lines))
    comm.barrier()
    lines = tf.data.TextLineDataset([str(folder / f"{number}.txt") for number in range(count)])
    read = lines.map(lambda line: tf.strings.to_number(line, tf.int64))
    labels = tf.data.Dataset.range(3 * count)
    for pair in ((read, labels), (labels, read)):
        found = []
        for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.zip(pair).batch(4)):
            inputs, targets = strategy.experimental_local_results(batch)[0]
            np.testing.assert_array_equal(inputs, targets)
            found += inputs.numpy().tolist()
        whole = functools.reduce(operator.iadd, comm.all_gather_object(found), [])
        assert sorted(whole) == list(range(3 * count))
    together = with_policy(tf, tf.data.Dataset.zip((read, labels)).batch(4), policies.FILE)
    with pytest.raises(ValueError, match=r"sources that aren't files which .*FILE can't"):
        strategy.experimental_distribute_dataset(together)
    with strategy.scope():
        model = tf.keras.Sequential(
            [tf.keras.Input((1,), dtype="int64"), tf.keras.layers.Identity()]
        )
    found = model.predict(read.map(lambda each: each[None]).batch(4), verbose=0)
    assert found[:, 0].tolist() == list(range(3 * count))


def test_from_a_function(tf, strategy, comm):
    def make(context):
        assert context.num_input_pipelines == context.num_replicas_in_sync == comm.size
        assert context.input_pipeline_id == comm.rank
        batch = context.get_per_replica_batch_size(6 * comm.size)
        return tf.data.Dataset.range(30 + 6 * context.input_pipeline_id).batch(batch)

    distributed = strategy.distribute_datasets_from_function(make)
    steps = rows(strategy, distributed)
    # The others' data ends earlier; they get empty batches until all have ended.
    assert len(steps) == 5 + comm.size - 1
    assert sum(map(len, steps)) == 30 + 6 * comm.rank

    @tf.function
    def count(batches):
        steps, total = 0, tf.constant(0, tf.int64)
        for batch in batches:
            own = strategy.run(lambda each: tf.reduce_sum(each), args=(batch,))
            total += strategy.reduce("SUM", own, axis=None)
            steps += 1
        return steps, total

    steps, total = count(distributed)
    assert int(steps) == 5 + comm.size - 1
    assert int(total) == sum(sum(range(30 + 6 * rank)) for rank in range(comm.size))


def test_known_lengths_need_no_agreement(tf, strategy, comm, monkeypatch):
    distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))

    def refused(*_, **__):
        raise AssertionError("a collective call")

    monkeypatch.setattr(type(strategy.array_strategy), "all_reduce_arrays", refused)
    assert len(rows(strategy, distributed)) == 2


def test_batches_of_a_data_task(tf, ds, comm):
    strategy = ds.MultiWorkerMirroredStrategy(strategies.DatasetWorker.resolver(1, comm))
    with pytest.raises(TypeError, match=r"must be one of strategies or strategies\.tensorflow"):
        strategies.DatasetWorker(tf.distribute.OneDeviceStrategy("/cpu:0"), None)
    training = strategy.communicator.size
    with strategies.DatasetWorker(
        strategy, lambda context: np.arange(6.0 * training).reshape(-1, 2)
    ) as batches:
        assert batches.serves == (comm.rank == comm.size - 1)
        if batches.serves:
            assert batches.serve() == 1
        else:
            sums = [strategy.run(tf.reduce_sum, args=(batch,)) for batch in batches]
            total = strategy.reduce("SUM", tf.add_n(sums), axis=None)
            assert float(total) == sum(range(6 * training))


def test_iterators_and_optionals(tf, strategy, comm):
    dataset = tf.data.Dataset.range(2 * comm.size).batch(comm.size)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    local = strategy.experimental_local_results(next(iterator))
    assert [each.numpy().tolist() for each in local] == [[comm.rank]]
    assert bool(iterator.get_next_as_optional().has_value())
    assert not bool(iterator.get_next_as_optional().has_value())
    with pytest.raises(StopIteration):
        next(iterator)
    endless = iter(strategy.experimental_distribute_dataset(dataset.repeat()))
    total = 0
    for _ in range(5):
        total += int(strategy.reduce("SUM", next(endless), axis=0))
    ranks = range(comm.size)
    assert total == 3 * sum(ranks) + 2 * sum(comm.size + each for each in ranks)
    array = np.arange(4.0)
    made = strategy.experimental_make_numpy_dataset(array)
    np.testing.assert_array_equal([each.numpy() for each in made], array)


def test_files_of_an_asserted_cardinality(tf, strategy, comm, folder):
    """AUTO splits files, so that ranks have different numbers of batches; all end together."""
    names = [str(folder / f"{number}.records") for number in range(comm.size)]
    if comm.rank == 0:
        for number, name in enumerate(names):
            with tf.io.TFRecordWriter(name) as file:
                for row in range(2 + 4 * number):
                    file.write(str(10 * number + row))
    comm.barrier()
    rows_in_all = 2 * comm.size * comm.size
    records = tf.data.TFRecordDataset(names).map(lambda each: tf.strings.to_number(each, tf.int64))
    asserted = records.apply(tf.data.experimental.assert_cardinality(rows_in_all))
    distributed = strategy.experimental_distribute_dataset(asserted.batch(2 * comm.size))
    found = comm.all_gather_object(rows(strategy, distributed))
    assert len({len(each) for each in found}) == 1
    whole = sorted(row for steps in found for step in steps for row in step)
    assert whole == [10 * n + row for n in range(comm.size) for row in range(2 + 4 * n)]


def test_one_ranks_own_dataset_has_no_end(tf, strategy, comm):
    """With OFF each rank reads its own: the others' end is the end of all that have rows."""
    off = tf.data.experimental.AutoShardPolicy.OFF
    own = tf.data.Dataset.from_tensors([comm.rank] * comm.size)
    own = with_policy(tf, own.repeat(None if comm.rank else 1), off)
    batches = iter(strategy.experimental_distribute_dataset(own))
    steps = comm.size + 2
    local = [strategy.experimental_local_results(next(batches))[0] for _ in range(steps)]
    expected = [[comm.rank]] * (steps if comm.rank else comm.size)
    assert [each.numpy().tolist() for each in local if each.shape[0]] == expected


def test_errors_of_one_rank(tf, strategy, comm, folder):
    """Too few files for FILE, and a function that fails on one rank: the same error on all."""
    name = str(folder / "only.txt")
    if comm.rank == 0:
        (folder / "only.txt").write_text("1\n2\n")
    comm.barrier()
    file = tf.data.experimental.AutoShardPolicy.FILE
    lines = with_policy(tf, tf.data.TextLineDataset([name]).batch(2), file)
    with pytest.raises(ValueError, match=f"has 1 files: must have at least {comm.size}"):
        strategy.experimental_distribute_dataset(lines)

    def make(context):
        if comm.rank == comm.size - 1:
            raise FileNotFoundError("of the last rank")
        return tf.data.Dataset.range(3)

    with pytest.raises(FileNotFoundError, match="of the last rank"):
        strategy.distribute_datasets_from_function(make)
    assert float(strategy.reduce("SUM", tf.constant(1.0), axis=None)) == comm.size


def test_elements_without_rows_of_different_numbers(tf, strategy, comm):
    """The rank with fewer would get a sample that nobody made."""
    with pytest.raises(ValueError, match="must be batches where the ranks have different"):
        strategy.distribute_datasets_from_function(
            lambda context: tf.data.Dataset.range(2 + context.input_pipeline_id)
        )
    for dataset in (tf.data.Dataset.range(2), tf.data.Dataset.range(2).filter(lambda _: True)):
        made = strategy.distribute_datasets_from_function(lambda _, given=dataset: given)
        assert rows(strategy, made) == [0, 1]
    with pytest.raises(TypeError, match="a RaggedTensor can't be reduced or gathered"):
        strategy.gather(tf.ragged.constant([[1], [2, 3]]), axis=0)


def test_datasets_of_a_function_with_different_lengths(tf, strategy, comm):
    """Also where TensorFlow counts the batches: no rank ends before the others."""
    for steps in (comm.rank + 1, None):

        def dataset_fn(context, steps=steps):
            dataset = tf.data.Dataset.from_tensors([1.0]).repeat(steps).batch(1)
            return dataset.take(comm.rank + 2)

        data = strategy.distribute_datasets_from_function(dataset_fn)
        assert int(data.cardinality) == tf.data.UNKNOWN_CARDINALITY
        rows = [int(strategy.run(lambda x: tf.shape(x)[0], (batch,))) for batch in data]
        assert rows == [1] * sum(rows) + [0] * (len(rows) - sum(rows))
        assert comm.all_gather_object(len(rows)) == [len(rows)] * comm.size
