"""The code that replaces what TensorFlow has removed, as the page's table gives it."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "coming-from" / "tf-removed.md"

SERVER = """
import json, os, sys
import collectives

roles, code = json.loads(sys.argv[1]), sys.argv[2]
comm = collectives.world(deadline=30)
cluster = {"worker": ["a"], "ps": ["b"]}
task = {"type": roles[comm.rank], "index": 0}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
namespace = {}
exec(code, namespace)
if task["type"] == "worker":
    print(json.dumps(namespace["found"].tolist()))
"""

COORDINATOR = """
import json, os, sys
import collectives

roles, code = json.loads(sys.argv[1]), sys.argv[2]
comm = collectives.world(deadline=60)
task = {"type": roles[comm.rank], "index": 0}
cluster = {role: ["a"] for role in roles}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
namespace = {"__name__": "__main__"}
exec(code, namespace)
if task["type"] == "chief":
    found = [float(each) for each in namespace["losses"]], namespace["weights"][0].tolist()
    print(json.dumps(found))
"""


def blocks():
    """The code of each subsection."""
    parts = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    found = {
        part.split("\n")[0]: re.search(r"```python\n(.*?)```", part, re.DOTALL) for part in parts
    }
    return {name: code[1] for name, code in found.items()}


def uses():
    """The second cell of each row of the table."""
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [use for _, use in rows[1:] if use != "---"]


def executed(code):
    namespace = {"__name__": "__main__"}
    exec(compile(code, PAGE.name, "exec"), namespace)
    return namespace


def test_each_row_has_code():
    linked = [name for use in uses() for name in re.findall(r"\]\(#(\w+)\)", use)]
    assert linked == [name.lower() for name in blocks()] == ["estimator", "session", "server"]
    assert len(uses()) == 5


def test_the_server(launch):
    """Its ten steps of SGD towards 1, with a rate of 0.1."""
    command = [sys.executable, "-c", SERVER, '["ps", "worker"]', blocks()["Server"]]
    ended = launch(2, command, timeout=60)
    assert ended.returncode == 0, ended.stderr
    np.testing.assert_allclose(json.loads(ended.stdout), [1 - 0.9**10] * 3)


@pytest.mark.slow
def test_the_coordinator(tf, launch):
    """The model learns to add."""
    page = (DOCS / "how-to" / "parameter-servers.md").read_text(encoding="utf-8")
    text = page.split("## Models of TensorFlow and Keras")[1]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    command = [sys.executable, "-c", COORDINATOR, '["ps", "worker", "chief"]', code]
    ended = launch(3, command, timeout=200)
    assert ended.returncode == 0, ended.stderr
    losses, kernel = json.loads(ended.stdout.splitlines()[-1])
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 10
    np.testing.assert_allclose(kernel, np.ones((3, 1)), atol=0.3)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.timeout_seconds(300)
@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options")
def test_the_rows_of_tensorflow(tf, folder, monkeypatch, equal_on_all):
    monkeypatch.chdir(folder)
    code = blocks()
    found = executed(code["Estimator"])["metrics"]
    assert found["global_step"] == 20
    assert sorted(found) == ["global_step", "loss", "mae"]
    equal_on_all(list(found.values()))
    names = ["model.ckpt-10.index", "model.ckpt-20.index"]
    assert sorted(each.name for each in (folder / "model").glob("*.index")) == names
    losses = executed(code["Session"])["losses"]
    # Each step multiplies the error by 1 - 0.1 * 2.
    np.testing.assert_allclose(losses, 0.64 ** np.arange(10), rtol=1e-4)
    equal_on_all(losses)
    metric = tf.keras.metrics.Mean()
    metric.update_state(3.0)
    for use in uses()[3:]:
        for expression in re.findall(r"`(.*?)`", use):
            eval(expression, {"tf": tf, "metric": metric})
    assert float(metric.result()) == 0
