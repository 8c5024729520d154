"""The suite as it runs by default notices faults: each of these is one line of the package.

The line is looked for in the whole package, wherever the file lies.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Sabotage(NamedTuple):
    """What is replaced by what, and the tests that must notice it, with pytest's options."""

    line: str
    by: str
    noticed_by: str
    worlds: str = "2,3"


SABOTAGES = {
    # What travels with the check between nodes
    "a message of another call is used": Sabotage(
        "here = received[0] == word", "here = True", "test_two_lone_ranks"
    ),
    "a leader that may be late sends data": Sabotage(
        "and now - self.began <= self._gap", "and True", "test_nodes_check"
    ),
    "a rank reads the result of the call before": Sabotage(
        "check_counted(signature, word, exchange)\n        out[...] = results[parity]",
        "check_counted(signature, word, exchange)\n        out[...] = results[1 - parity]",
        "test_between_nodes",
    ),
    "a rank that has seen all others wait doesn't look once more": Sabotage(
        "elif self._others_wait(waiting, committed):",
        "else:",
        "test_intents",
    ),
    "rows are joined in the order of the nodes": Sabotage(
        "places[rank] = buffer.content, buffer.words, at",
        "places[places.index(None)] = buffer.content, buffer.words, at",
        "test_between_nodes",
    ),
    "a rank reads the rows of the call before": Sabotage(
        "return self._joined[self._parity]",
        "return self._joined[1 - self._parity]",
        "test_between_nodes",
    ),
    "the root's node is taken for that of the first rank": Sabotage(
        "self._between(collective, None, own, node, overlapped=overlapped)",
        "self._between(collective, None, own, 0, overlapped=overlapped)",
        "test_between_nodes",
    ),
    "a chunk does not leave the pipeline": Sabotage(
        "preceding = [partial(leave, each) for each in chunks[max(0, index - 1) : index]]",
        "preceding = []",
        "test_between_nodes",
    ),
    "a segment is that before it": Sabotage(
        "_part(self.receives, start, nbytes)",
        "_part(self.receives, max(0, start - nbytes), nbytes)",
        "test_between_nodes",
    ),
    "a wait in the node's memory leaves messages undelivered": Sabotage(
        "    transport.progress()",
        "    pass",
        "test_between_nodes",
        worlds="4",
    ),
    "a part of a reduction is that of another rank": Sabotage(
        "target[...] = folded[self._part]",
        "target[...] = folded[: len(target)]",
        "test_between_nodes",
    ),
    "the array behind the root's pickle isn't counted": Sabotage(
        "few = length + nbytes <= row.most", "few = nbytes <= row.most", "test_between_nodes"
    ),
    # The agreement
    "the fingerprint ignores the op": Sabotage(
        "return self[:-2]", "return (self[0], *self[2:-2])", "test_mismatches"
    ),
    "the fingerprint ignores the shape": Sabotage(
        "return self[:-2]", "return (*self[:3], *self[4:-2])", "test_mismatches"
    ),
    "the fingerprint ignores the root": Sabotage(
        "return self[:-2]", "return (*self[:4], self[5])", "test_mismatches"
    ),
    "a call that was withdrawn is counted": Sabotage(
        "self.sequence = sequence - 1", "pass", "test_deadlines"
    ),
    "every deadline is 15 s": Sabotage(
        "if waited >= self.deadline + grace and not ready():",
        "if waited >= 15 + grace and not ready():",
        "test_deadlines",
    ),
    "a leader does not commit the ranks that it has collected": Sabotage(
        "memory.publish(COLLECTED, word)\n        for", "for", "test_verdict_barrier"
    ),
    "a node that has sent its message is collected again": Sabotage(
        "swapped or verdicts.collect(word, sequence)",
        "verdicts.collect(word, sequence)",
        "test_two_shared_nodes",
        worlds="4",
    ),
    "a meeting ends without a fence": Sabotage(
        "                    self.memory.fence()\n                return alike",
        "                    pass\n                return alike",
        "test_fences",
    ),
    # Compression
    "PowerSGD forgets what it left out": Sabotage(
        "errors.append(matrices[number] - left @ own[number].T)",
        "errors.append(0 * matrices[number])",
        "test_compression",
    ),
    "the largest elements are taken, and the others forgotten": Sabotage(
        "carried[chosen] = 0", "carried[...] = 0", "test_compression"
    ),
    "only the leaders have the compressed sums": Sabotage(
        "self._node.broadcast(flat)", "pass", "test_compression"
    ),
    # Bound calls
    "a bound call does not wait for the other rank": Sabotage(
        "if not one_word or peer[index] != word:\n            arrive(signature, word, sequence)",
        "if False:\n            pass",
        "test_ways",
    ),
    "a bound all_gather does not check the room of out": Sabotage(
        "check_room(counts, rooms)\n        rows", "pass\n        rows", "test_shared"
    ),
    # The engine and the reductions
    "a mean of short arrays is not divided": Sabotage(
        "divides, finish = reduction.divides, reduction.finish",
        "divides, finish = False, reduction.finish",
        "test_shared",
    ),
    "a mean that the ranks of a node fold is not divided": Sabotage(
        "if self.divides:\n            self.finish(out, len(pieces))", "pass", "test_fused"
    ),
    "a mean is divided in its first block alone": Sabotage(
        "self.fold_ranks([each[block] for each in pieces], out[block], scratch)",
        "fold_in_order(self.fold, [each[block] for each in pieces], out[block], scratch)",
        "test_same_bits",
    ),
    "a mean between nodes is not divided": Sabotage(
        "self._reduction.finish(folded, len(self._levels.places))", "pass", "test_between_nodes"
    ),
    "a block is folded before its message has arrived": Sabotage(
        "actions.append(partial(fold, distance - 1))",
        "actions.append(partial(fold, distance))",
        "test_between_nodes",
        worlds="6",
    ),
    "the block that arrived last is not gathered on the node": Sabotage(
        "node, part = origin, places[origin]\n            leave(node, part)",
        "node, part = origin, places[origin]",
        "test_between_nodes",
        worlds="6",
    ),
    "the operands of a schedule's fold depend on the rank": Sabotage(
        "first, second = (received, own) if step.peer < self.rank else (own, received)",
        "first, second = (own, received)",
        "test_same_bits",
    ),
    "the operands of two ranks' fold depend on the rank": Sabotage(
        "pair = (given, peer_block) if peer else (peer_block, given)",
        "pair = (given, peer_block)",
        "test_shared test_same_bits",
    ),
    "buffers bound by the target's address alone": Sabotage(
        "key = (target_address if source is None else address(source), target_address)",
        "key = (target_address, target_address)",
        "test_communicator",
    ),
    "a bucket is unpacked to the wrong arrays": Sabotage(
        ".reshape(slot.shape) for slot in bucket.slots]",
        ".reshape(slot.shape) for slot in reversed(bucket.slots)]",
        "test_fusion",
    ),
    # The node's memory
    "both stages of a rank are one": Sabotage(
        "for at in (_STAGES_AT, _STAGES_AT + STAGE_BYTES)]",
        "for at in (_STAGES_AT, _STAGES_AT)]",
        "test_ways",
    ),
    "a short array lies in the slot of the call before": Sabotage(
        "own_slots[parity][...] = array", "own_slots[1 - parity][...] = array", "test_communicator"
    ),
    "the slices do not reach the end": Sabotage(
        "edges = [lines * part // parts * unit for part in range(parts + 1)]",
        "edges = [lines * part // (parts + 1) * unit for part in range(parts + 1)]",
        "test_ways",
    ),
    "where registered arrays lay in the first call": Sabotage(
        "if rows != self._rows:", "if not self._rows:", "test_shared"
    ),
    "memory that one rank has let go of is used again": Sabotage(
        "for number in set(released[0]).intersection(*released[1:]):",
        "for number in set(released[0]).union(*released[1:]):",
        "test_empty_shared",
    ),
    "a bound list is copied after its call": Sabotage(
        "self.make = bind(engine, operation.signature, self._run, path=PACKED)",
        "call = bind(engine, operation.signature, self._run, path=PACKED)\n"
        "        self.make = lambda *each: PASS if (got := call(*each)) is PASS else list(got)",
        "test_interruptions",
    ),
    # Messages
    "an enclosed buffer begins a place late": Sabotage(
        "buffers.append(envelope[place : place + length])",
        "buffers.append(envelope[place + 1 : place + length + 1])",
        "test_mailbox",
    ),
    # Arrays on GPUs
    "a tensor is overwritten while a call reads it": Sabotage(
        "cuda().hand_back(self.tensor)", "pass", "test_gpu_streams"
    ),
    "a bound call takes an argument that it does not have": Sabotage(
        "or not given.keys() <= defaults.keys()", "", "test_gpu_streams"
    ),
    "a graph captures what it can't": Sabotage(
        "return PASS if current_stream().capturing() else bound(array, out)",
        "return bound(array, out)",
        "test_gpu_streams",
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package and its tests in another folder."""
    folder = tmp_path_factory.mktemp("copy")
    left_out = shutil.ignore_patterns("__pycache__")
    for name in ("collectives", "strategies", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_suite(folder, names, worlds="2,3"):
    """Run files of tests, until the first failure, as a plain `pytest` does but for few worlds."""
    parts = [folder / "tests" / part for part in ("collectives", "devices")]
    found = {path.stem: path for part in parts for path in part.glob("test_*.py")}
    files = [str(found[name]) for name in names.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--worlds", worlds]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "--tb=short", *files],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )


def holders_of(line, folder):
    """The files that have the line, as often as they have it."""
    sources = {
        path: path.read_text(encoding="utf-8") for path in folder.glob("collectives/**/*.py")
    }
    return [path for path, text in sources.items() for _ in range(text.count(line))]


def test_each_line_is_in_the_package_once():
    found = {name: holders_of(each.line, ROOT) for name, each in SABOTAGES.items()}
    assert not {name: holders for name, holders in found.items() if len(holders) != 1}


# Each test that waits for a deadline of 15 s takes that long.
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotage_of_one_line_is_noticed(copy, name):
    sabotage = SABOTAGES[name]
    (path,) = holders_of(sabotage.line, copy)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(sabotage.line, sabotage.by), encoding="utf-8")
    try:
        ended = run_suite(copy, sabotage.noticed_by, sabotage.worlds)
    finally:
        path.write_text(text, encoding="utf-8")
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(.*)", ended.stdout, re.MULTILINE)
    assert ended.returncode == 1, ended.stdout
    assert failed, ended.stdout
    print(f"{name}: {failed[0]}")


@pytest.mark.slow
def test_the_same_tests_pass_on_what_is_sound(copy):
    names = {name for sabotage in SABOTAGES.values() for name in sabotage.noticed_by.split()}
    ended = run_suite(copy, " ".join(sorted(names)))
    assert ended.returncode == 0, ended.stdout
