"""A checkpoint's file: every dtype is restored, and every invalid file is refused."""

import contextlib
import json
import pickletools

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as draw
from hypothesis.extra import numpy as draw_numpy

from strategies.checkpoint import CheckpointError
from strategies.checkpoint.tensor_file import FORMAT, decode, encode, write
from tests.strategies.support import refusal

DTYPES = [
    *(np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64),
    *(np.float16, np.float32, np.float64, np.longdouble),
    *(np.complex64, np.complex128, np.clongdouble),
    *(ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint4),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz),
    *(ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e4m3, ml_dtypes.float8_e3m4),
]
SAFETENSORS_OWN = {np.float32: "F32", np.bool_: "BOOL", np.complex64: "C64"} | {
    ml_dtypes.bfloat16: "BF16",
    ml_dtypes.float8_e4m3fn: "F8_E4M3",
    ml_dtypes.float8_e5m2: "F8_E5M2",
}


def assert_same(tensors, wanted):
    assert sorted(tensors) == sorted(wanted)
    for name, array in wanted.items():
        assert tensors[name].dtype == array.dtype
        assert tensors[name].shape == array.shape
        # The padding bytes of a long double are arbitrary.
        assert tensors[name].tobytes() == array.tobytes() or np.array_equal(tensors[name], array)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (2, 3, 2)])
def test_every_dtype_and_shape_is_restored(dtype, shape):
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 + 1
    tensors = {"w": values.astype(dtype), "z/ü": np.ones(1)}
    assert_same(decode(encode(tensors), "file"), tensors)


@pytest.mark.parametrize("dtype", SAFETENSORS_OWN, ids=lambda dtype: np.dtype(dtype).name)
def test_other_readers_find_the_dtypes_of_safetensors(dtype):
    content = encode({"w": np.ones((2, 3), dtype)})
    ((name, stored),) = safetensors.deserialize(content)
    assert (name, stored["dtype"], stored["shape"]) == ("w", SAFETENSORS_OWN[dtype], [2, 3])


def test_dtypes_that_safetensors_lacks_are_stored_as_bytes():
    ((_, stored),) = safetensors.deserialize(encode({"w": np.ones((2, 3), np.complex128)}))
    assert (stored["dtype"], stored["shape"]) == ("U8", [2, 3, 16])


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(12.0)[::-3],
        np.arange(6.0).reshape(2, 3).T,
        np.broadcast_to(np.float32(2.5), (2, 2)),
        np.array([1.5, 2.5], ">f8"),
        np.array(7, ">i4"),
    ],
)
def test_values_of_any_memory_layout_are_restored(array):
    back = decode(encode({"w": array}), "file")["w"]
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype.newbyteorder("=")


@draw.composite
def arrays(choose):
    """Arrays of any dtype, shape and bits."""
    dtype = np.dtype(choose(draw.sampled_from(DTYPES)))
    shape = choose(draw_numpy.array_shapes(min_dims=0, min_side=0, max_side=4))
    length = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(choose(draw.binary(min_size=length, max_size=length)), dtype).reshape(
        shape
    )


names = draw.text(draw.characters(exclude_categories=["Cs"])).filter(lambda n: n != "__metadata__")


@given(draw.dictionaries(names, arrays(), max_size=5))
def test_any_tensors_are_restored(tensors):
    assert_same(decode(encode(tensors), "file"), tensors)


@pytest.mark.parametrize(
    "array", [np.array("text"), np.array([None]), np.zeros(1, "M8[s]"), np.zeros(1, "V3")]
)
def test_only_numbers_are_written(array):
    refusal(TypeError, "w has dtype .*: must be numeric or bool", encode, {"w": array})


def test_records_are_not_numbers():
    array = np.zeros(2, [("a", "f4"), ("b", "i4")])
    refusal(TypeError, "must be numeric or bool", encode, {"w": array})


def test_equal_tensors_give_equal_files():
    tensors = {f"w{number}": np.full(number, number) for number in range(5)}
    assert len({encode(dict(sorted(tensors.items(), reverse=way))) for way in (0, 1) * 5}) == 1


def test_there_is_no_pickle_in_it():
    content = encode({"w": np.arange(5.0), "v": np.ones(2, np.complex128)})
    with pytest.raises(ValueError, match="opcode"):
        list(pickletools.genops(content))


# --- refusals ------------------------------------------------------------------------------------

TENSORS = {
    "model/weights": np.arange(12, dtype=np.float32).reshape(3, 4),
    "model/bias": np.ones(4, ml_dtypes.bfloat16),
    "phase": np.array([1 + 2j]),
    "step": np.array(7),
}
CONTENT = encode(TENSORS)


def foreign(metadata):
    return safetensors.numpy.save({"w": np.ones(3)}, metadata)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "incomplete, or not a safetensors file"),
        (b"\x00", "incomplete"),
        (b"\x80\x04pickle", "incomplete"),
        (b"x" * 1000, "incomplete"),
        (CONTENT[:-1], "incomplete"),
        (CONTENT + b"\x00", "incomplete"),
        (foreign(None), "a safetensors file, but without the metadata of strategies.Checkpoint"),
        (foreign({"format": "pt"}), "but without the metadata of strategies.Checkpoint"),
        (foreign({FORMAT: "1"}), "corrupt: TypeError"),
        (foreign({FORMAT: "{"}), "corrupt: JSONDecodeError"),
        (foreign({FORMAT: "{}"}), "has version None: must be 1"),
        (foreign({FORMAT: '{"version": 2}'}), "has version 2: must be 1"),
        (foreign({FORMAT: '{"version": 1}'}), "corrupt: KeyError"),
        (foreign({FORMAT: '{"version": 1, "as_bytes": []}'}), "corrupt: AttributeError"),
        (
            foreign({FORMAT: '{"version": 1, "as_bytes": {}}'}),
            "corrupt: the checksum doesn't match",
        ),
        (foreign({FORMAT: '{"version": 1, "as_bytes": {"w": "O"}}'}), "corrupt: ValueError"),
    ],
)
def test_what_is_no_checkpoint_is_refused_by_name(content, match):
    text = refusal(CheckpointError, match, decode, content, "some/file")
    assert text.startswith("some/file: ")


@settings(max_examples=300)
@given(draw.integers(0, len(CONTENT) - 1))
def test_a_file_cut_short_anywhere_is_refused(length):
    refusal(CheckpointError, "file: ", decode, CONTENT[:length], "file")


@settings(max_examples=600)
@given(
    draw.lists(draw.tuples(draw.integers(0, len(CONTENT) - 1), draw.integers(1, 255)), min_size=1)
)
def test_a_damaged_file_is_refused_or_has_the_same_content(changes):
    """A few bytes have no meaning: spaces in the header."""
    damaged = bytearray(CONTENT)
    for place, change in changes:
        damaged[place] ^= change
    with contextlib.suppress(CheckpointError):
        assert_same(decode(bytes(damaged), "file"), TENSORS)


def test_every_byte_of_the_data_counts():
    header = 8 + int.from_bytes(CONTENT[:8], "little")
    for place in range(header, len(CONTENT)):
        damaged = bytearray(CONTENT)
        damaged[place] ^= 1
        refusal(CheckpointError, "the checksum doesn't match", decode, bytes(damaged), "file")


@pytest.mark.parametrize(
    ("seen", "instead"),
    [
        (b'"step"', b'"stop"'),
        (b'"shape":[3,4]', b'"shape":[4,3]'),
        (b'"dtype":"F32"', b'"dtype":"I32"'),
        (b'\\"complex128\\"', b'\\"longdouble\\"'),
        (b'\\"as_bytes\\"', b'\\"as_bytez\\"'),
    ],
)
def test_a_changed_header_is_refused(seen, instead):
    assert CONTENT.count(seen) == 1
    head = int.from_bytes(CONTENT[:8], "little")
    changed = CONTENT[8 : 8 + head].replace(seen, instead).ljust(head)
    content = len(changed).to_bytes(8, "little") + changed + CONTENT[8 + head :]
    assert json.loads(changed)
    refusal(CheckpointError, "file: ", decode, content, "file")


# --- writing -------------------------------------------------------------------------------------


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "deep" / "down" / "file"
    assert write(str(path), b"old") == str(path)
    write(str(path), b"new")
    assert path.read_bytes() == b"new"
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_a_failure_keeps_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write(str(path), b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    refusal(OSError, "No space left", write, str(path), b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_of_that_name_is_not_replaced(tmp_path):
    (tmp_path / "file").mkdir()
    refusal(IsADirectoryError, "file", write, str(tmp_path / "file"), b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
