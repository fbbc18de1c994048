"""What an experiment dictionary may say, what it means, and its id. Imports no torch."""

from trainer.config.identity import canonical_json, digest, exp_id
from trainer.config.schema import (
    Base,
    EmbeddedTokenizer,
    Experiment,
    ExperimentBase,
    Fraction,
    Optim,
    Positive,
    RandomBase,
    Schedule,
    Strict,
    Train,
    nearest,
    validate,
)

__all__ = [
    "Base",
    "EmbeddedTokenizer",
    "Experiment",
    "ExperimentBase",
    "Fraction",
    "Optim",
    "Positive",
    "RandomBase",
    "Schedule",
    "Strict",
    "Train",
    "canonical_json",
    "digest",
    "exp_id",
    "nearest",
    "validate",
]
