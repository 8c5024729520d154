"""The manifests for Kubernetes: checked against the operator's schema, their commands run on hosts.

There is no cluster here. The test does what Kubernetes and the operator do with the manifests:
names, host files and environment variables.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import hosts
from tests.worlds.launcher import find_mpirun, is_open_mpi
from tests.worlds.pages import run_in
from tests.worlds.programs import run_launcher

yaml = pytest.importorskip("yaml", reason="PyYAML, which reads the manifests, isn't installed")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
SCHEMA = json.loads(Path(__file__).with_name("mpijob_schema.json").read_text())["schema"]
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
MPIJOBS = ("mpijob-mpich", "mpijob-openmpi")


def manifest(name):
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def problems(value, schema, where):
    """What a server that validates fields strictly would refuse."""
    kind = schema.get("type", "any")
    if kind != "any" and not isinstance(value, TYPES[kind]):
        return [f"{where} is {value!r}, no {kind}"]
    found = [f"{where} is {value!r}"] if value not in schema.get("enum", [value]) else []
    if isinstance(value, list):
        for number, each in enumerate(value):
            found += problems(each, schema["items"], f"{where}[{number}]")
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties")
        found += [
            f"{where} lacks {name}" for name in schema.get("required", ()) if name not in value
        ]
        for name, each in value.items():
            rule = known.get(name, other)
            if rule is not None:
                found += problems(each, rule, f"{where}.{name}")
            elif known:
                found.append(f"{where}.{name} is unknown")
    return found


@pytest.mark.parametrize("name", MPIJOBS)
def test_an_mpijob_fits_the_operators_schema(name):
    (job,) = manifest(name)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert problems(job, SCHEMA, "job") == []
    assert set(job["spec"]["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    # The schema is no empty one.
    job["spec"]["mpiImplementation"] = "mpich"
    job["spec"]["slots"] = 2
    del job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["name"]
    job["spec"]["slotsPerWorker"] = "2"
    assert len(problems(job, SCHEMA, "job")) == 4


def test_pods_mount_what_they_name_and_the_names_of_tasks_are_the_pods():
    service, job = manifest("tf-config")
    pod = job["spec"]["template"]["spec"]
    schema = SCHEMA["properties"]["spec"]["properties"]["mpiReplicaSpecs"]["additionalProperties"]
    assert problems(pod, schema["properties"]["template"]["properties"]["spec"], "pod") == []
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    config = json.loads(environment_of(pod["containers"][0], 1)["TF_CONFIG"])
    assert config["task"] == {"type": "worker", "index": 1}
    addresses = [f"{name}:{service['spec']['ports'][0]['port']}" for name in pods_of(job)]
    assert config["cluster"] == {"worker": addresses}


@pytest.mark.slow
def test_the_container_has_what_the_job_needs_and_nothing_else(tmp_path):
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    extras = re.search(r"whl\)\[(\w+),\$MPI\]", text)[1]
    assert f'"{extras}": ' in (ROOT / "setup.py").read_text(encoding="utf-8")
    copies = re.findall(r"^COPY (?:--chmod=\d+ )?(.+) \S+$", text, re.MULTILINE)
    paths = [path for each in copies for path in each.split()]
    first, *others = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()[1:]
    assert (first, others.pop()) == ("*", "**/__pycache__")
    assert sorted(others) == sorted(f"!{path}" for path in paths)
    # What is copied is enough to install the packages, and to run the program with them.
    for path in paths:
        source, target = ROOT / path, tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    build = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", "installed"]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    shutil.rmtree(tmp_path / "collectives")
    shutil.rmtree(tmp_path / "strategies")
    program = "import runpy, strategies; print(strategies.__file__)"
    program += "; runpy.run_path('examples/train_digits.py', run_name='__main__')"
    command = ["sh", "-c", f'cd {tmp_path} && {sys.executable} -c "{program}" --epochs 1']
    ended = run_launcher(command, {"PYTHONPATH": str(tmp_path / "installed")}, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith(str(tmp_path / "installed"))
    assert "test accuracy" in ended.stdout


def pods_of(job):
    """The pods' names: those of an Indexed Job with a subdomain."""
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    subdomain = spec["template"]["spec"]["subdomain"]
    return [
        f"{job['metadata']['name']}-{index}.{subdomain}" for index in range(spec["completions"])
    ]


def environment_of(container, index):
    """The environment of one pod of the job, with Kubernetes' references expanded."""
    values = {}
    for each in container["env"]:
        if "value" in each:
            values[each["name"]] = re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], each["value"])
        else:
            (source,) = each["valueFrom"]
            values[each["name"]] = str(index) if source == "fieldRef" else "the secret"
    return values


needs_hosts = pytest.mark.skipif(
    hosts.why_not() is not None, reason=f"no hosts can be imitated: {hosts.why_not()}"
)
BETWEEN_HOSTS = {"UCX_TLS": "tcp,self", "OMPI_MCA_mpi_yield_when_idle": "1"}


@pytest.mark.slow
@needs_hosts
def test_the_command_of_an_mpijob(tmp_path):
    open_mpi = is_open_mpi(find_mpirun())
    (job,) = manifest(MPIJOBS[open_mpi])
    parts, slots = job["spec"]["mpiReplicaSpecs"], job["spec"]["slotsPerWorker"]
    count = parts["Worker"]["replicas"]
    workers = [f"digits-worker-{number}.digits.default.svc" for number in range(count)]
    hostfile = tmp_path / "hostfile"
    form = "{} slots={}\n" if open_mpi else "{}:{}\n"
    hostfile.write_text("".join(form.format(each, slots) for each in workers))
    command = parts["Launcher"]["template"]["spec"]["containers"][0]["args"]
    line = shlex.join([str(FOLDER / "entrypoint.sh"), *command, "--epochs", "1"])
    variables = {"K_MPI_JOB_ROLE": "launcher", "MPI_HOSTFILE": str(hostfile)}
    # As the operator sets it for each implementation; Open MPI 5 reads neither.
    name = "OMPI_MCA_orte_default_hostfile" if open_mpi else "HYDRA_HOST_FILE"
    variables[name] = str(hostfile)
    launcher = "digits-launcher"
    with hosts.hosts(count + 1, [launcher, *workers]) as (_, agent):
        ended = run_in(
            tmp_path,
            {},
            line.replace("/etc/mpi/hostfile", str(hostfile)),
            path=[str(agent.parent)],
            prefix=[str(agent), launcher],
            **variables,
            **BETWEEN_HOSTS,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{count * slots} replicas in sync" in ended.stdout


@pytest.mark.slow
@needs_hosts
def test_the_command_of_the_pods(tmp_path):
    if is_open_mpi(find_mpirun()):
        pytest.skip("only MPICH can start without mpirun")
    _, job = manifest("tf-config")
    container, pods = job["spec"]["template"]["spec"]["containers"][0], pods_of(job)
    command = shlex.join([*container["command"], "--epochs", "1"])
    with hosts.hosts(len(pods), pods) as (_, agent):
        script = ""
        for index, pod in enumerate(pods):
            variables = shlex.join(
                f"{name}={value}" for name, value in environment_of(container, index).items()
            )
            script += f"{agent} {pod} {shlex.quote(f'env {variables} {command}')} &\n"
        ended = run_in(tmp_path, {}, f"{script}wait", **BETWEEN_HOSTS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{len(pods)} replicas in sync" in ended.stdout
    assert "Traceback" not in ended.stderr
    assert "test accuracy" in ended.stdout
