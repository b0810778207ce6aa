"""The files in examples/cluster: shells accept them, their flags exist, manifests fit the schema.

`KAITIAN_MPIJOB_CRD=FILE` names the MPI Operator's own definition, `kubeflow.org_mpijobs.yaml`: then
the manifests are compared with all of it, pods included.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from test_docs import PARSERS

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.runtime.command import parse_launcher

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/cluster"
SCRIPTS = sorted([*FOLDER.glob("*.sbatch"), *FOLDER.glob("*.sh")])
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
MPIRUN_OPTIONS = {"hostfile", "with-ft", "bind-to", "x"}

TEXT, COUNT, YES_OR_NO = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEMPLATE = {"type": "object", "required": ["spec"], "x-kubernetes-preserve-unknown-fields": True}


def one_of(*values):
    return {"type": "string", "enum": list(values)}


def fields(required=(), **properties):
    return {"type": "object", "required": list(required), "properties": properties}


REPLICAS = fields(
    ["replicas", "template"],
    replicas={"type": "integer", "minimum": 1},
    restartPolicy=one_of("Never", "OnFailure"),
    template=TEMPLATE,
)
# The fields of kubeflow.org/v2beta1, as its documentation lists them.
MPIJOB = fields(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion=one_of("kubeflow.org/v2beta1"),
    kind=one_of("MPIJob"),
    metadata=fields(["name"], name=TEXT, namespace=TEXT),
    spec=fields(
        ["mpiReplicaSpecs"],
        slotsPerWorker={"type": "integer", "minimum": 1},
        runLauncherAsWorker=YES_OR_NO,
        sshAuthMountPath=TEXT,
        launcherCreationPolicy=one_of("AtStartup", "WaitForWorkersReady"),
        mpiImplementation=one_of("OpenMPI", "Intel", "MPICH"),
        runPolicy=fields(
            cleanPodPolicy=one_of("None", "Running", "All"),
            ttlSecondsAfterFinished=COUNT,
            activeDeadlineSeconds=COUNT,
            backoffLimit=COUNT,
            suspend=YES_OR_NO,
        ),
        mpiReplicaSpecs=fields(["Launcher", "Worker"], Launcher=REPLICAS, Worker=REPLICAS),
    ),
)
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def misfits(value, schema, place="") -> list[str]:
    """Return what is wrong with a value, by the part of JSON Schema that Kubernetes uses."""
    if schema.get("x-kubernetes-int-or-string"):
        is_right = isinstance(value, int | str) and not isinstance(value, bool)
        return [] if is_right else [f"{place}: {value!r} is no number or text"]
    kind = TYPES.get(schema.get("type", ""))
    if kind is not None and (
        not isinstance(value, kind) or (kind is int and isinstance(value, bool))
    ):
        return [f"{place}: {value!r} is no {schema['type']}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{place}: {value!r} is not one of {schema['enum']}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{place}: {value!r} is below {schema['minimum']}")
    if isinstance(value, list):
        for number, item in enumerate(value):
            found += misfits(item, schema.get("items", {}), f"{place}[{number}]")
    if isinstance(value, dict):
        found += [f"{place}: no {name}" for name in schema.get("required", ()) if name not in value]
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        is_open = schema.get("x-kubernetes-preserve-unknown-fields") or not (known or others)
        for name, item in value.items():
            if name in known or isinstance(others, dict):
                found += misfits(item, known.get(name, others), f"{place}.{name}")
            elif not is_open and place + name not in ("apiVersion", "kind", "metadata"):
                found.append(f"{place}.{name}: unknown")
    return found


def objects():
    for path in MANIFESTS:
        for content in yaml.safe_load_all(path.read_text()):
            yield pytest.param(content, id=f"{path.name}-{content['kind']}")


def launch_scripts():
    """Return all shell scripts by their names, those in manifests too."""
    found = {path.name: path.read_text() for path in SCRIPTS}
    for path in MANIFESTS:
        job = next(yaml.safe_load_all(path.read_text()))
        pod = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["command"] == ["bash", "-c"]
        (found[path.name],) = container["args"]
    return found


@pytest.mark.parametrize("name", launch_scripts())
def test_shells_accept_the_scripts(name):
    done = subprocess.run(
        ["bash", "-n"], input=launch_scripts()[name], text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", launch_scripts())
def test_the_scripts_start_commands_with_flags_that_exist(name):
    text = re.sub(r"\\\n\s*", "", launch_scripts()[name])
    (line,) = [
        line
        for line in text.splitlines()
        if "kaitian-train" in line and not line.lstrip().startswith("#")
    ]
    words = shlex.split(line.replace("${arguments[@]}", "$@").rstrip("&)"))
    at = next(index for index, word in enumerate(words) if word.endswith("kaitian-train"))
    flags = [word for word in words[at + 1 :] if word != "$@"]
    TrainConfig(**vars(PARSERS["kaitian-train"].parse_args(flags)))
    if "mpirun" in words[:at]:
        launcher = parse_launcher(words)
        names = {part.name for part in launcher.parts if part.name}
        assert names <= MPIRUN_OPTIONS
        assert launcher.arguments[0] == words[at]


@pytest.mark.parametrize("content", list(objects()))
def test_manifests_have_the_fields_of_their_kinds(content):
    if content["kind"] == "MPIJob":
        assert misfits(content, MPIJOB) == []
    if not (path := os.environ.get("KAITIAN_MPIJOB_CRD")):
        return
    definition = yaml.safe_load(Path(path).read_text())
    (version,) = [v for v in definition["spec"]["versions"] if v["name"] == "v2beta1"]
    schema = version["schema"]["openAPIV3Schema"]
    if content["kind"] == "MPIJob":
        assert misfits(content, schema) == []
    elif content["kind"] == "StatefulSet":
        specs = schema["properties"]["spec"]["properties"]["mpiReplicaSpecs"]
        pods = specs["additionalProperties"]["properties"]["template"]
        assert misfits(content["spec"]["template"], pods) == []


def test_unlike_pods_belong_together():
    by_kind = {
        content["kind"]: content
        for content in yaml.safe_load_all((FOLDER / "mpijob-unlike.yaml").read_text())
    }
    job, pods = by_kind["MPIJob"], by_kind["StatefulSet"]
    name, service = pods["metadata"]["name"], by_kind["Service"]
    labels = pods["spec"]["template"]["metadata"]["labels"]
    assert labels == pods["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert pods["spec"]["serviceName"] == service["metadata"]["name"]
    hosts = [line.split()[0] for line in by_kind["ConfigMap"]["data"]["hostfile"].splitlines()]
    assert hosts == [
        f"{name}-{n}.{service['metadata']['name']}" for n in range(pods["spec"]["replicas"])
    ]
    volumes = {volume["name"]: volume for volume in pods["spec"]["template"]["spec"]["volumes"]}
    assert volumes["ssh"]["secret"]["secretName"] == f"{job['metadata']['name']}-ssh"
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    assert {"name": "ssh", "mountPath": job["spec"]["sshAuthMountPath"]} in container[
        "volumeMounts"
    ]


def test_the_schema_finds_mistakes():
    job = next(yaml.safe_load_all((FOLDER / "mpijob.yaml").read_text()))
    job["spec"]["slotPerWorker"] = job["spec"].pop("slotsPerWorker")
    job["spec"]["runPolicy"]["cleanPodPolicy"] = "Al"
    job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] = "2"
    del job["spec"]["mpiReplicaSpecs"]["Launcher"]
    assert len(misfits(job, MPIJOB)) == 4


def test_images_copy_what_exists_and_their_shell_is_right():
    text = re.sub(r"\\\n", "", (FOLDER / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    words = {line.split()[0] for line in lines}
    assert words == {"ARG", "FROM", "USER", "RUN", "COPY", "ENV", "WORKDIR"}
    copied = [source for line in lines if line.startswith("COPY") for source in line.split()[1:-1]]
    definition = (FOLDER / "apptainer.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n((?: .*\n|\n)*)", definition, re.M))
    copied += [line.split()[0] for line in sections["files"].splitlines() if line.strip()]
    assert set(copied) == {"pyproject.toml", "README.md", "LICENSE", "kaitian_mpi"}
    assert all((ROOT / source).exists() for source in copied)
    scripts = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN")]
    for script in [*scripts, *(sections[name] for name in ("post", "environment", "runscript"))]:
        done = subprocess.run(["sh", "-n"], input=script, text=True, check=False)
        assert done.returncode == 0, script


def test_the_page_names_every_file_and_no_other():
    page = (ROOT / "docs/clusters.md").read_text()
    names = r"[\w-]+\.(?:sbatch|def)|pbs\.sh|\bmpijob[\w-]*\.yaml|Dockerfile"
    named = set(re.findall(names, page))
    assert named == {path.name for path in FOLDER.iterdir()}
