"""Keys: which names and texts hold one, and what a job may inherit without any.

A key of W&B is never in a dictionary, an argument, a scheduler's file or the code snapshot. The job
itself reads it from a file of mode 0600 (or the platform mounts it) just before the training
starts. Without a key wandb runs offline.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from fnmatch import translate

from trainer.config.userfile import START_FOLDER

# characters; a shorter value of a variable called ..._TOKEN is a switch, not a secret
MIN_SECRET = 20
BLOT = "[redacted]"

# fmt: off
_NEVER = (
    ".env*", ".netrc", "_netrc", ".git-credentials", ".pgpass", ".pypirc", ".ssh", ".aws",
    ".gnupg", ".kube",
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
_SHOWN_KEY = re.compile(r"((?:key|login|password)\W{1,8})[0-9a-f]{40}(?![0-9a-z])", re.IGNORECASE)

# fmt: off
_INHERITED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH", "CPATH", "CC", "CXX", "MAX_JOBS", "PYTHONPATH", "PYTHONUNBUFFERED",
    "PYTHONHASHSEED",
    "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "CUDA_HOME", "CUDA_PATH", "HF_HOME",
    "HF_ENDPOINT",
    "XDG_CACHE_HOME", "NETRC", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
})
_FAMILIES = (
    "LC_", "CONDA_", "HF_HUB_", "HF_DATASETS_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_",
    "PYTORCH_", "OMP_", "MKL_",
    "NCCL_", "GLOO_", "UCX_", "DS_", "TRITON_", "WANDB_", "LATHE_",
)
# fmt: on
_OF_ANOTHER_RUN = frozenset({"WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_SWEEP_ID", START_FOLDER})
# Never CUDA_VISIBLE_DEVICES: the submitter's would go over the devices that the queue gives to each
# job.
_OF_THIS_MACHINE = frozenset({"TMPDIR", "CUDA_DEVICE_ORDER"})


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


def secret_in(content: bytes, secrets: Mapping[str, str]) -> str | None:
    """Where a file's content holds a key and which, without the key ("line 3: a key of W&B"); None
    when it does not.

    secrets: those of this user (`secrets_in`), looked for word for word. Else a key is 40
    hexadecimal digits behind "wandb" and one of key, login and password, or what begins with
    wandb_v1_ or hf_.
    """
    for name, value in secrets.items():
        place = content.find(value.encode(errors="surrogateescape"))
        if place >= 0:
            return f"line {_line(content, place)}: the value of {name}"
    if b"wandb" in content.lower() and (match := _WANDB_KEY.search(content)):
        return f"line {_line(content, match.end() - 1)}: a key of W&B"
    if (b"hf_" in content or b"wandb_v1_" in content) and (match := _TOKEN.search(content)):
        return f"line {_line(content, match.start())}: an access token"
    return None


def _line(content: bytes, place: int) -> int:
    return content.count(b"\n", 0, place) + 1


def redact(text: str) -> str:
    """`text` without what looks like a key of W&B or a token of Hugging Face."""
    return _SHOWN_KEY.sub(rf"\1{BLOT}", _SHOWN_TOKEN.sub(BLOT, text))


SECRET = re.compile(
    r"(_|\b)(API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|\b)", re.IGNORECASE
)
