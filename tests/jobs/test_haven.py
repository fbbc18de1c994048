"""jobs/haven.py against the real haven-ai 0.7.3: its ids, its groups, its ResultManager and its JobManager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exp_configs import EXP_GROUPS, cartesian_exp_group
from jobs import haven
from jobs.backends.toolkit import Toolkit
from jobs.eai import EaiJob
from tests.jobs.toolkit_standin import Standin, standin
from trainer.config import exp_id
from trainer.errors import ConfigError

pytest.importorskip("haven", reason="haven is optional: pip install 'lathe[haven]'", exc_type=ImportError)
