"""What others call our keys: one table by name. Imports no torch.

Whoever brings one of these names into a dictionary is told our key, or the flag of trainval.py, or
what to do where there is neither. The pages of docs/coming-from/ take their tables from it.
"""

from trainer.config.synonyms import libraries, peers, programs
from trainer.config.synonyms.synonym import Synonym

__all__ = ["SYNONYMS", "Synonym"]

SYNONYMS: dict[str, Synonym] = libraries.SYNONYMS | programs.SYNONYMS | peers.SYNONYMS
