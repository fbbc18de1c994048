"""The code of a job: a copy of the project as it was submitted, stored once for each content.

<savedir_base>/_jobs/code/<digest>/
    tree/          the files, read-only; jobs run here
    code.tar.gz    the same files: sorted, no times, no owners
    dirty.patch    git diff of what was not committed, when there was such
    code.json      commit, branch, digest, sizes, every file; written last: a snapshot without it does not count

The digest is the sha256 over (mode, sha256, path) of all files, so the same content is the same snapshot, whatever
the commit is called and whoever submits. Taken are the files of the project's whole git repository as they are in the
working tree: tracked ones, and untracked ones that .gitignore does not exclude. Left out, wherever they lie:

- .git, the savedir_base, untracked litter (caches, virtual environments, results/, wandb/);
- files that are called like a secret (`keys.is_secret_file`);
- checkpoints and weights (.safetensors, .pt, .pth, .bin, .ckpt, .gguf, .pkl) of more than 1 MiB;
- links that are absolute or lead out of the project.

A file whose content holds a key is an error and not left out: without it the code might not run, and a key in a
source file wants a person's attention. So is a file over 20 MiB, or more than 200 MiB together.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jobs import keys
from jobs.layout import BaseFolder, RunFolder, read_json
from jobs.repository import Source, read_source
from jobs.record import now
from trainer.disk import refusals, replace_file
from trainer.errors import ConfigError, LatheError, StorageError
