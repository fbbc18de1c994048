"""W&B's key: where a job finds it, and how it is kept out of everything that is stored, shown or
sent.

The key is never in a dictionary, an argument, a scheduler's file or the code snapshot. The job
itself reads it from a file of mode 0600 (or the platform mounts it) just before the training
starts. Without a key wandb runs offline.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from jobs.config import SECRET, JobConfig
from jobs.record.paths import RunFolder
from trainer.errors import ConfigError

KEY = re.compile(
    r"[A-Za-z0-9_-]{40,512}\Z"
)  # 40 hexadecimal digits, or the newer and longer wandb_v1_...
MIN_SECRET = (
    20  # characters; a shorter value of a variable called ..._TOKEN is a switch, not a secret
)
MIN_REDACTED = 8  # characters; to blot out every "1" would blot out the text
BLOT = "[redacted]"

# fmt: off
_NEVER = (
    ".env*", ".netrc", "_netrc", ".git-credentials", ".pgpass", ".pypirc", ".ssh", ".aws", ".gnupg", ".kube",
    "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
)
# fmt: on
_UNLESS_SOURCE = (
    "*credentials*",
    "*wandb*key*",
)  # credentials.py is a module, and its text is searched all the same
_SOURCE = (".py", ".pyi", ".md", ".rst")
_SECRET_NAME = re.compile("|".join(translate(pattern) for pattern in _NEVER))
_SUSPECT_NAME = re.compile("|".join(translate(pattern) for pattern in _UNLESS_SOURCE))

# A commit hash has 40 hexadecimal digits too (wandb @ git+https://...@<hash>): only one after
# "key", "login" or "password" is a key. The second form is W&B's newer key, the third Hugging
# Face's token.
_WANDB_KEY = re.compile(
    rb"wandb[\s\S]{0,60}?(?:key|login|password)[\s\S]{0,16}?(?<![0-9a-z])[0-9a-f]{40}(?![0-9a-z])",
    re.IGNORECASE,
)
_TOKEN = re.compile(rb"\b(?:wandb_v1_[A-Za-z0-9_-]{40,}|hf_[A-Za-z0-9]{34,})\b")
_SHOWN_TOKEN = re.compile(_TOKEN.pattern.decode())
_SHOWN_KEY = re.compile(
    r"((?:api_?key|login|password)\W{1,8})[0-9a-f]{40}(?![0-9a-z])", re.IGNORECASE
)

# fmt: off
_INHERITED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "LIBRARY_PATH", "CPATH", "CC", "CXX", "MAX_JOBS", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONHASHSEED",
    "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "CUDA_HOME", "CUDA_PATH", "HF_HOME", "HF_ENDPOINT",
    "XDG_CACHE_HOME", "NETRC", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
})
_FAMILIES = (
    "LC_", "CONDA_", "HF_HUB_", "HF_DATASETS_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "PYTORCH_", "OMP_", "MKL_",
    "NCCL_", "GLOO_", "UCX_", "DS_", "TRITON_", "WANDB_", "LATHE_",
)
# fmt: on
_OF_ANOTHER_RUN = frozenset({"WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_SWEEP_ID"})
# Never CUDA_VISIBLE_DEVICES: the submitter's would go over the devices that the queue gives to each
# job.
_OF_THIS_MACHINE = frozenset({"TMPDIR", "CUDA_DEVICE_ORDER"})


@dataclass(frozen=True)
class KeySource:
    """Where the key of a job comes from. `text` is for status and doctor and never holds
    the key.
    """

    kind: Literal["file", "environment", "platform", "none"]
    text: str
    key_file: Path | None = (
        None  # the file that the job must read into WANDB_API_KEY; None: nothing to read
    )


def find_key_source(job: JobConfig, environ: Mapping[str, str]) -> KeySource:
    """Where a submitted job will find W&B's key: secret of the platform, key file, netrc file, or
    nowhere.

    A key in the submitter's environment is reported, and not handed on. ConfigError for a key file
    that is named in the job dictionary or as WANDB_API_KEY_FILE and will not do (`check_key_file`).
    """
    if job.wandb_key_secret is not None:
        return KeySource("platform", f"W&B key: secret {job.wandb_key_secret} of the platform")
    named = job.wandb_key_file or environ.get("WANDB_API_KEY_FILE")
    if named:
        path = Path(named).expanduser().absolute()
        check_key_file(path)
        return KeySource("file", f"W&B key: {path}, read by the job itself", path)
    found = _netrc_with_key(environ)
    if found is not None:
        return KeySource(
            "file", f"W&B key: {found}, read by wandb itself where this home folder is mounted"
        )
    if environ.get("WANDB_API_KEY"):
        return KeySource(
            "environment",
            "W&B key: only WANDB_API_KEY of this shell, which no submitted job gets: its wandb "
            "runs offline. "
            "Write the key to a file of mode 0600 and name that as wandb_key_file",
        )
    return KeySource(
        "none", "W&B key: none found, so wandb runs offline; `wandb sync` sends the runs later"
    )


def _netrc_with_key(environ: Mapping[str, str]) -> Path | None:
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(environ.get("NETRC") or Path(environ.get("HOME", "~")).expanduser() / ".netrc")
    try:
        return path if netrc(path).authenticators(host) is not None else None
    except (OSError, NetrcParseError, UnicodeDecodeError):
        return None


def check_key_file(path: Path) -> None:
    """Return when a file may serve as the key file of jobs; ConfigError names everything that is
    wrong with it.

    It must be a regular file (or a link to one) of this user, of mode 0600 exactly, that holds one
    line which looks like a key: 40 or more of A-Z, a-z, 0-9, _ and -. The error never shows what
    the file holds.
    """
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )  # a FIFO must not hang the submission
    except OSError as error:
        raise ConfigError(
            f"wandb_key_file {path}: {error.strerror}. Write the key to it, and: chmod 600 "
            f"{shlex.quote(str(path))}"
        ) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(
                f"wandb_key_file {path}: not a regular file. Name the file that holds the key."
            )
        problems = [*_wrong_access(path, status), *_wrong_content(os.read(descriptor, 2048))]
    finally:
        os.close(descriptor)
    if problems:
        raise ConfigError(f"wandb_key_file {path}: " + "; ".join(problems))


def _wrong_access(path: Path, status: os.stat_result) -> list[str]:
    problems: list[str] = []
    if status.st_uid != os.geteuid():
        problems.append(
            f"owned by user {status.st_uid}, want {os.geteuid()}: use a copy of your own"
        )
    if (mode := stat.S_IMODE(status.st_mode)) != 0o600:
        problems.append(f"mode {mode:04o}, want 0600: chmod 600 {shlex.quote(str(path))}")
    return problems


def _wrong_content(content: bytes) -> list[str]:
    lines = content.decode("ascii", "replace").splitlines()
    if len(lines) == 1 and KEY.match(lines[0].strip()):
        return []
    length = f"a first line of {len(lines[0].strip())} characters" if lines else "nothing"
    return [
        f"{len(lines)} lines with {length}, want one line with 40 or more of A-Z, a-z, 0-9, _ and -"
    ]


def minimal_environment(
    environ: Mapping[str, str], *, is_same_machine: bool = False
) -> dict[str, str]:
    """The variables that a submitted job inherits, by an allow-list; never a secret.

    Left out are all others, every name that looks like a secret, every value that holds one of
    those secrets or a password in a URL, values of several lines, and CUDA_VISIBLE_DEVICES, which
    is the scheduler's to say. is_same_machine: also what is true of this machine only (TMPDIR,
    CUDA_DEVICE_ORDER).
    """
    hidden = tuple(secrets_in(environ).values())
    inherited = _INHERITED | _OF_THIS_MACHINE if is_same_machine else _INHERITED
    return {
        name: value
        for name, value in environ.items()
        if (name in inherited or name.startswith(_FAMILIES))
        and name not in _OF_ANOTHER_RUN
        and not SECRET.search(name)
        and not any(secret in value for secret in hidden)
        and not re.search(r"[\0\r\n]|://[^/\s]*@", value)
    }


def secrets_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Name and value of every variable that holds a secret; a path to one (WANDB_API_KEY_FILE) is
    none.
    """
    return {
        name: value
        for name, value in environ.items()
        if SECRET.search(name)
        and len(value) >= MIN_SECRET
        and not os.path.exists(os.path.expanduser(value))
    }


def is_secret_file(path: str) -> bool:
    """Whether a relative path names something that is never copied: .env, a private key, .netrc, a
    key of wandb ...

    Modules and texts (.py, .md, .rst) may be called after credentials or the key of wandb; what
    they hold is for `secret_in` to find.
    """
    parts = path.lower().split("/")
    if any(_SECRET_NAME.match(part) for part in parts):
        return True
    return not path.endswith(_SOURCE) and any(_SUSPECT_NAME.match(part) for part in parts)


def secret_in(content: bytes, known: Mapping[str, str]) -> str | None:
    """Where a file's content holds a key and which, without the key ("line 3: a key of W&B"); None
    when it does not.

    known: secrets of this user (`secrets_in`), looked for word for word. Else a key is 40
    hexadecimal digits behind "wandb" and one of key, login and password, or what begins with
    wandb_v1_ or hf_.
    """
    for name, value in known.items():
        place = content.find(value.encode(errors="surrogateescape"))
        if place >= 0:
            return f"line {_line(content, place)}: the value of {name}"
    if b"wandb" in content.lower() and (found := _WANDB_KEY.search(content)):
        return f"line {_line(content, found.end() - 1)}: a key of W&B"
    if (b"hf_" in content or b"wandb_v1_" in content) and (found := _TOKEN.search(content)):
        return f"line {_line(content, found.start())}: an access token"
    return None


def _line(content: bytes, place: int) -> int:
    return content.count(b"\n", 0, place) + 1


def redact(text: str, secrets: Iterable[str]) -> str:
    """`text` without these secrets (of 8 characters or more), and without whatever else looks like
    a key.
    """
    for secret in sorted(secrets, key=len, reverse=True):  # one may be the beginning of another
        if len(secret) >= MIN_REDACTED:
            text = text.replace(secret, BLOT)
    return _SHOWN_KEY.sub(rf"\1{BLOT}", _SHOWN_TOKEN.sub(BLOT, text))


def sync_hint(folder: RunFolder) -> str | None:
    """The command that sends the offline wandb runs of an experiment, oldest first; None when all
    were sent.

    A run of several files, of which some were sent, still waits. Cheap where there are none: status
    asks for each row. Source: wandb 0.31 leaves run-<id>.wandb.synced beside a file that it has
    sent.
    """
    try:
        names = sorted(os.listdir(folder.path / "wandb"))
    except OSError:  # none, or not ours to read
        return None
    runs = [folder.path / "wandb" / name for name in names if name.startswith("offline-run-")]
    waiting = [
        str(run)
        for run in runs
        if any(not file.with_suffix(".wandb.synced").exists() for file in run.glob("*.wandb"))
    ]
    return shlex.join(["wandb", "sync", *waiting]) if waiting else None
