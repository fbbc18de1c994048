"""What a job dictionary may say to Kubernetes: names, images, volumes and texts, checked before
they are sent. The models of the kubernetes client refuse misspelt fields, and none of these.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from jobs.config import JobConfig
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from jobs.protocol import JobSpec

# and room for "-node-0-<index>" within 63 letters
DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?\Z")
DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\Z")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}\Z")
SECRET_KEY = re.compile(r"[A-Za-z0-9._-]{1,253}\Z")
TOKEN_FORM = re.compile(r"[a-z][a-z0-9_]*[a-z0-9]\Z")

# Keys of other backends: set here they would be ignored, and nothing is ever ignored.
FOREIGN = (
    *(
        "account_id",
        "data",
        "preemptable",
        "restartable",
        "bid",
        "partition",
        "account",
        "qos",
        "gres",
        "constraint",
    ),
    *("reservation", "exclude", "nodelist", "time", "requeue", "signal_s"),
)
K8S_ONLY = ("image", "namespace", "queue", "service_account", "volumes", "wandb_key_secret")


def refuse_foreign(
    spec: JobSpec, keys: tuple[str, ...], *, backend: str, allow_gpu_model: bool = False
) -> None:
    """ConfigError names every key of the job dictionary that `backend` does not know.

    Jobs to wait for are named too.
    """
    default, job = JobConfig(), spec.job
    foreign = [key for key in keys if getattr(job, key) != getattr(default, key)]
    of_gpu = ("gpu_mem",) if allow_gpu_model else ("gpu_mem", "gpu_model")
    foreign += [f"resources.{key}" for key in of_gpu if getattr(job.resources, key) is not None]
    if foreign:
        raise ConfigError(
            f"job: the {backend} backend does not know {', '.join(foreign)}. Remove them, or use "
            "another."
        )
    if spec.after:
        raise ConfigError(
            f"after={spec.after}: the {backend} backend cannot wait for other jobs. Submit it "
            "later."
        )


def name_of(token: str) -> str:
    """The object's name: the token with "-" for "_"; ConfigError when it cannot be one.

    `token_in` is its inverse.
    """
    name = token.replace("_", "-")
    if not TOKEN_FORM.match(token) or not DNS_LABEL.match(name):
        raise ConfigError(
            f"token {token!r}: want at most 52 of [a-z0-9_], a letter first, none of '_' at the "
            "end."
        )
    return name


def token_in(name: str) -> str:
    """The token that an object's name was made of."""
    return name.replace("-", "_")


def label(text: str) -> str:
    """`text` with what a label may not hold replaced by "-".

    At most 63 letters, with a letter or a digit at both ends.
    """
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:63].strip("-_.")


def volume_parts(text: str) -> tuple[str, str, bool]:
    """(claim, mount path, is it read-only) of "<claim>:/mount[:ro]"."""
    claim, _, rest = text.partition(":")
    path, _, mode = rest.partition(":")
    return claim, path, mode == "ro"


def check_spec(spec: JobSpec) -> JobSpec:
    """`spec` itself; ConfigError with every fault in it.

    These are faults that the API server or a pod would only show later.
    """
    refuse_foreign(spec, ("address", *FOREIGN), backend="k8s")
    faults = [*_name_faults(spec), *_volume_faults(spec), *text_faults(spec)]
    if faults:
        raise ConfigError(
            f"job for k8s: {len(faults)} mistake(s)\n" + "\n".join(f"  {fault}" for fault in faults)
        )
    return spec


def _name_faults(spec: JobSpec) -> list[str]:
    job, faults = spec.job, list[str]()
    name_of(spec.token)
    if job.image is None:
        faults.append('image: required, for example "registry.example/lathe:1".')
    elif not IMAGE.match(job.image):
        faults.append(f"image: {job.image!r} is no image reference.")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", job.namespace):
        faults.append(f"namespace: {job.namespace!r} is no DNS label ([a-z0-9-]).")
    for key in ("queue", "service_account"):
        value = getattr(job, key)
        if value is not None and not (DNS_SUBDOMAIN.match(value) and label(value) == value):
            faults.append(f"{key}: {value!r} is no name of an object ([a-z0-9.-]).")
    if job.wandb_key_secret is not None:
        name, _, key = job.wandb_key_secret.partition("/")
        if not DNS_SUBDOMAIN.match(name) or not SECRET_KEY.match(key):
            faults.append(
                f'wandb_key_secret: {job.wandb_key_secret!r}, want "NAME/KEY" of a Secret.'
            )
    return faults


def _volume_faults(spec: JobSpec) -> list[str]:
    faults, paths = list[str](), list[str]()
    for text in spec.job.volumes:
        claim, path, _ = volume_parts(text)
        if (
            not DNS_SUBDOMAIN.match(claim)
            or not text.endswith((f":{path}", f":{path}:ro"))
            or not _is_path(path)
        ):
            faults.append(f'volumes: {text!r}, want "<claim>:/mount" or "<claim>:/mount:ro".')
        if path in paths:
            faults.append(f"volumes: {path!r} is mounted twice.")
        paths.append(path)
    for key in ("folder", "workdir"):
        value = getattr(spec, key)
        if not any(PurePosixPath(value).is_relative_to(path) for path in paths):
            faults.append(
                f"{key}: {value!r} lies below no mount of `volumes`, so a pod cannot see it."
            )
    return faults


def _is_path(path: str) -> bool:
    parts = path.split("/")[1:]
    return (
        path.startswith("/") and bool(parts) and all(part not in ("", ".", "..") for part in parts)
    )


def text_faults(spec: JobSpec) -> list[str]:
    """Faults of texts, a sentence for each.

    Control characters, which YAML and the kernel refuse, paths that lead elsewhere, and what is no
    program.
    """
    faults = list[str]()
    if (
        not spec.wrapper
        or spec.wrapper[0].startswith("-")
        or "=" in spec.wrapper[0]
        or not spec.wrapper[0]
    ):
        faults.append(
            f"wrapper: {spec.wrapper!r}, want the argv that runs the job, a program first."
        )
    for key, value in [("folder", spec.folder), ("workdir", spec.workdir)]:
        if not _is_path(value):
            faults.append(f"{key}: {value!r} is no absolute path without '..'.")
    texts = [
        ("folder", spec.folder),
        ("workdir", spec.workdir),
        ("group", spec.group),
        ("exp_id", spec.exp_id),
    ]
    for key, value in [*texts, *(("wrapper", part) for part in spec.wrapper)]:
        if not value.isprintable():
            faults.append(f"{key}: {value!r} holds a character that cannot be printed.")
    return faults
