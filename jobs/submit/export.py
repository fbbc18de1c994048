"""Prints jobs as texts that other tools submit: sbatch, eai, Kubeflow Trainer, SkyPilot."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import yaml

from jobs.backends.k8s import checks, manifest
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from jobs.protocol import JobSpec

Kind = Literal["sbatch", "eai", "trainjob", "sky"]
GPU_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*\Z")
RUNTIME = "torch-distributed"  # the ClusterTrainingRuntime that Kubeflow Trainer installs
# Constant text: SkyPilot runs `run` in bash on each node and tells which one that is.
SKY_NODES = (
    'export LATHE_NODE_RANK="$SKYPILOT_NODE_RANK"\n'
    'export LATHE_HEAD_NODE="$(printf \'%s\\n\' "$SKYPILOT_NODE_IPS" | head -n 1)"\n'
)


def export(spec: JobSpec, kind: Kind) -> str:
    """One attempt as text for `kind`; its first lines say how far that was validated.

    What runs is the same wrapper, so the run folder must lie on a file system that the job shares
    with this machine. ConfigError names what `kind` cannot do.
    """
    makers: dict[str, Callable[[JobSpec], str]] = {
        "sbatch": _sbatch,
        "eai": _eai,
        "trainjob": _trainjob,
        "sky": _sky,
    }
    if kind not in makers:
        raise ConfigError(f"export to {kind!r}: no such kind. Legal: {', '.join(makers)}.")
    return makers[kind](spec)


def _sbatch(spec: JobSpec) -> str:
    backend = importlib.import_module("jobs.backends.slurm.backend").Slurm()
    text = backend.render(spec).text
    shebang, _, rest = text.partition("\n")
    note = f"# Validated: {backend.validation}."
    # "#!" must come first
    return f"{shebang}\n{note}\n{rest}" if shebang.startswith("#!") else f"{note}\n{text}"


def _eai(spec: JobSpec) -> str:
    backend = importlib.import_module("jobs.backends.toolkit.backend").Toolkit()
    rendered = backend.render(spec)
    comments = [f"Validated: {backend.validation}.", f"Send it with: {shlex.join(rendered.argv)}"]
    # a word may hold a line break
    lines = [line for comment in comments for line in comment.splitlines()]
    return "".join(f"# {line}\n" for line in lines) + rendered.text


def _trainjob(spec: JobSpec) -> str:
    """A TrainJob of Kubeflow Trainer 2 (trainer.kubeflow.org/v1alpha1)."""
    pod = manifest.wire(manifest.pod_spec(checks.check_spec(spec)))
    [container] = pod["containers"]
    workdir = manifest.literal(spec.workdir)  # a TrainJob has no workingDir
    patch = {
        "serviceAccountName": spec.job.service_account,
        "terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"],
        "volumes": pod.get("volumes"),
        "containers": [{"name": manifest.REPLICATED, "volumeMounts": container["volumeMounts"]}],
    }
    pod_patch = {"spec": {key: value for key, value in patch.items() if value is not None}}
    replicated = {"name": manifest.REPLICATED, "template": {"spec": {"template": pod_patch}}}
    body = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": manifest.metadata(spec),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": RUNTIME,
            },
            "suspend": spec.job.queue is not None,
            "trainer": {
                "image": container["image"],
                "command": ["env", "-C", workdir, *container["command"]],
                "env": container["env"],
                "numNodes": spec.job.nodes,
                "resourcesPerNode": container["resources"],
            },
            "runtimePatches": [
                {
                    "manager": "lathe/export",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
                }
            ],
        },
    }
    note = (
        "# Validated: offline only, against the models of kubeflow_trainer_api 2.3. Needs "
        "Kubeflow Trainer >= 2.3 and\n"
        f"# its runtime {RUNTIME!r}. Nobody has submitted it to a cluster.\n"
    )
    return note + manifest.text_of(body)


def _sky(spec: JobSpec) -> str:
    """A task of SkyPilot: `sky launch FILE`."""
    checks.refuse_foreign(
        spec,
        (*checks.FOREIGN, *checks.K8S_ONLY, "address"),
        backend="sky",
        allow_gpu_model=True,
    )
    faults = checks.text_faults(spec)
    model, gpus = spec.job.resources.gpu_model, spec.job.resources.gpu
    if gpus and (model is None or not GPU_NAME.match(model)):
        faults.append(
            f"resources.gpu_model: {model!r}, want the name of a GPU as SkyPilot has it, for "
            'example "A100".'
        )
    if faults:
        raise ConfigError(
            f"job for sky: {len(faults)} mistake(s)\n" + "\n".join(f"  {fault}" for fault in faults)
        )
    accelerators: dict[str, Any] = {
        "cpus": f"{spec.job.resources.cpu}+",
        "memory": f"{spec.job.resources.mem}+",
    }
    if gpus:
        accelerators["accelerators"] = {str(model): gpus}
    body = {
        "name": checks.name_of(spec.token),
        "num_nodes": spec.job.nodes,
        "resources": accelerators,
        "envs": {"LATHE_JOB_ID": spec.token},
        "run": SKY_NODES + shlex.join(["env", "-C", spec.workdir, *spec.wrapper]) + "\n",
    }
    note = (
        "# Validated: read back as YAML, and `run` by bash; never by SkyPilot. The run folder "
        "and the code must lie\n"
        "# on the cluster at the same paths as here: on a shared disk, or by file_mounts.\n"
    )
    return note + yaml.dump(body, Dumper=_Blocks, sort_keys=False, width=4096, allow_unicode=True)


class _Blocks(yaml.SafeDumper):
    """Texts of several lines as blocks, for people; yaml quotes what a block cannot hold."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return yaml.ScalarNode("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Blocks.add_representer(str, _block)
