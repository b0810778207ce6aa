"""The files in examples/cluster: shells accept them, and their flags and fields exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from kaitian_mpi.cli.flags import parse_config
from kaitian_mpi.supervise.mpirun_command import parse_launcher

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/cluster"
SCRIPTS = sorted([*FOLDER.glob("*.sbatch"), *FOLDER.glob("*.sh")])
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
MPIRUN_OPTIONS = {"hostfile", "with-ft", "bind-to", "x"}

# The fields of kubeflow.org/v2beta1 that the manifests use, as its documentation lists them.
MPIJOB_FIELDS = {
    *("slotsPerWorker", "runLauncherAsWorker", "sshAuthMountPath", "launcherCreationPolicy"),
    *("mpiImplementation", "runPolicy", "mpiReplicaSpecs"),
}
POLICY_FIELDS = {"cleanPodPolicy", "ttlSecondsAfterFinished", "backoffLimit", "suspend"}


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
def test_shells_accept_the_scripts_and_commands_the_flags(name):
    script = launch_scripts()[name]
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = re.sub(r"\\\n\s*", "", script).splitlines()
    (line,) = (x for x in lines if "kaitian-train" in x and not x.lstrip().startswith("#"))
    words = shlex.split(line.replace("${arguments[@]}", "$@").rstrip("&)"))
    at = next(index for index, word in enumerate(words) if word.endswith("kaitian-train"))
    parse_config("kaitian-train", [word for word in words[at + 1 :] if word != "$@"])
    if "mpirun" in words[:at]:
        launcher = parse_launcher(words)
        assert {part.name for part in launcher.parts if part.name} <= MPIRUN_OPTIONS
        assert launcher.arguments[0] == words[at]


@pytest.mark.parametrize(
    "content", [each for each in objects() if each.values[0]["kind"] == "MPIJob"]
)
def test_manifests_have_the_fields_of_an_mpijob(content):
    assert content["apiVersion"] == "kubeflow.org/v2beta1"
    spec = content["spec"]
    assert spec.keys() <= MPIJOB_FIELDS
    assert spec["runPolicy"].keys() <= POLICY_FIELDS
    assert spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert {"Launcher", "Worker"} == spec["mpiReplicaSpecs"].keys()
    for replicas in spec["mpiReplicaSpecs"].values():
        assert replicas["replicas"] >= 1
        assert replicas["template"]["spec"]["containers"]


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
