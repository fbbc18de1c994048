"""The job dictionary: where an experiment runs, never what it computes. Its keys are those of haven
and Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from jobs.gres import gpus_of
from jobs.secret_keys import SECRET
from trainer.config.block import Positive, Strict
from trainer.config.synonyms import Synonym
from trainer.errors import ConfigError
from trainer.files.survive import FORM

# What may stand in a name, a path, a mount or an #SBATCH value. No space, no quote, nothing a shell
# or an option parser could read as more than text; no leading dash.
Word = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.:/@+=,%\[\]{}!~][A-Za-z0-9_.:/@+=,%\[\]{}!~-]{0,254}$")
]
# of nodes, as Slurm combines them: "a100|h100", "[rack1|rack2]", "(intel&gpu)*2"
Features = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.(\[!][A-Za-z0-9_.:/@+=,%()\[\]!|&*-]{0,254}$")
]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.][A-Za-z0-9_.-]{0,63}$")]
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Resources(Strict):
    """What one node of a job needs. Units: cores, GiB, GPUs."""

    cpu: Positive = 1
    mem: Positive = 8  # GiB
    gpu: Annotated[int, Field(ge=0)] = 0
    gpu_mem: Positive | None = None  # GiB a GPU
    gpu_model: Word | None = None  # "A100", or "!A100" for any other; toolkit only


# What sbatch takes, and people write into a job dictionary, but no key here stands for.
SYNONYMS = {
    "exclusive": Synonym(
        advice="A job gets the cores, memory and GPUs that it asks for. To have a node alone, ask "
        "for all that it has: resources.cpu, resources.mem, resources.gpu."
    ),
    "gpus": Synonym(keys=("resources.gpu",)),
    "gpus_per_node": Synonym(keys=("resources.gpu",)),
    "cpus_per_task": Synonym(keys=("resources.cpu",)),
    "ntasks": Synonym(keys=("nodes", "resources.gpu"), advice="torchrun starts the ranks."),
    "ntasks_per_node": Synonym(keys=("resources.gpu",), advice="torchrun starts the ranks."),
}


class JobConfig(Strict):
    """One job dictionary. A key that the chosen backend does not know is an error, never
    ignored.
    """

    synonyms = SYNONYMS

    resources: Resources = Resources()
    nodes: Positive = 1
    # launch line, as --python_binary; "": torchrun when there are several GPUs, else python
    python_binary: str = ""
    # ranks on the node that go on when one dies, and spares for them, as --survive: "7+1"
    survive: Annotated[str, Field(pattern=f"^({FORM})$")] | None = None
    # interpreter that runs the wrapper on the node; None: the submitter's own
    python: Word | None = None
    # or haven's list of "NAME=value"
    environment_vars: dict[str, str] = Field(default_factory=dict)
    max_run_time: Positive | None = None  # seconds
    grace_s: Positive = 120  # between asking a job to stop and killing it
    max_retries: Annotated[int, Field(ge=0)] = 0  # after failures that were not bad input
    max_preemptions: Annotated[int, Field(ge=0)] = 20
    wandb_key_file: Word | None = None  # a file of mode 0600, read by the job itself
    # k8s: NAME/KEY of a Secret; toolkit: a mount of `data` that holds the key file
    wandb_key_secret: Word | None = None
    # toolkit (haven's keys)
    account_id: Word | None = None
    image: Word | None = None
    data: list[Word] = Field(default_factory=list)
    preemptable: bool = False
    restartable: bool = False
    interactive: Literal[False] = False
    bid: Annotated[int, Field(ge=0)] | None = None
    # Slurm
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    # instead of resources.gpu, for example "gpu:a100:4"; of several entries those named gpu count
    gres: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    constraint: Features | None = None
    reservation: Word | None = None
    exclude: Word | None = None
    nodelist: Word | None = None
    # as sbatch --time
    time: Annotated[str, Field(pattern=r"^([0-9]+-)?[0-9]+(:[0-9]{2}){0,2}$")] | None = None
    requeue: bool = True
    signal_s: Positive | None = None  # SIGUSR1 so many seconds before the time limit
    # ray and k8s
    address: Word | None = None  # of a Ray cluster's dashboard
    namespace: Name = "default"
    queue: Name | None = None  # Kueue's LocalQueue
    service_account: Name | None = None
    volumes: list[Word] = Field(default_factory=list)  # k8s: "<claim>:/mount[:ro]"

    @field_validator("gres")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        if value is not None:
            gpus_of(value)
        return value

    @field_validator("environment_vars", mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        items = [str(item) for item in cast("list[Any]", value)]
        if not all("=" in item for item in items):
            raise ValueError('each entry of the list must be "NAME=value"')
        names = [item.partition("=")[0] for item in items]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)}: several values, want one each")
        return dict(item.split("=", 1) for item in items)

    @field_validator("environment_vars")
    @classmethod
    def _harmless(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not VARIABLE.match(name):
                raise ValueError(f"{name!r} is not the name of an environment variable")
            if "\0" in text or "\n" in text:
                raise ValueError(f"the value of {name} holds a NUL or a line break")
            if SECRET.search(name):
                raise ValueError(
                    f"{name} looks like a secret, and job dictionaries are stored and shown. Use "
                    "wandb_key_file, or the platform's own secret"
                )
        return value

    @model_validator(mode="after")
    def _one_gpu_count(self) -> JobConfig:
        if self.gres is not None and self.resources.gpu:
            raise ValueError(
                f"gres={self.gres!r} and resources.gpu={self.resources.gpu} are both set; keep one"
            )
        return self

    @property
    def gpus(self) -> int:
        """GPUs of one node, whether stated in `resources` or as Slurm's `gres`."""
        return self.resources.gpu if self.gres is None else gpus_of(self.gres)

    def refuse_foreign(self, backend: str, own: Collection[str]) -> None:
        """ConfigError for every key that is set and that `backend` neither shares with all others
        nor calls its own.
        """
        changed = [key for key, value in self if value != getattr(_UNTOUCHED, key)]
        foreign = [key for key in changed if key not in SHARED and key not in own]
        if foreign:
            keys = ", ".join(sorted({*SHARED, *own}))
            raise ConfigError(
                f"job dictionary: {backend} knows no {', '.join(foreign)}. Remove them. It "
                f"knows: {keys}"
            )


# Every backend knows these.
SHARED = frozenset(
    (
        "resources",
        "nodes",
        "python_binary",
        "survive",
        "python",
        "environment_vars",
        "max_run_time",
        "grace_s",
        "max_retries",
        "max_preemptions",
        "wandb_key_file",
        "interactive",
    )
)
_UNTOUCHED = JobConfig()
