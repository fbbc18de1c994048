"""Which sets there are: where each is published, its digests and its licence. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

Layout = Literal["as published", "natural questions", "scifact"]


@dataclass(frozen=True)
class PublicFile:
    """One file as it is published. What is packed (.gz) is unpacked where `name` is not."""

    name: str  # in the folder
    url: str
    sha256: str  # of the file in the folder


@dataclass(frozen=True)
class PublicSet:
    """Some files that belong together."""

    about: str
    licence: str
    files: tuple[PublicFile, ...]
    layout: Layout = "as published"
    groups: tuple[str, ...] = ()  # that read it


def _github(name: str, repository: str, path: str, sha256: str) -> PublicFile:
    """repository: owner/name@commit."""
    owner, _, commit = repository.partition("@")
    return PublicFile(
        name, f"https://raw.githubusercontent.com/{owner}/{commit}/{quote(path)}", sha256
    )


_SCITLDR = "SciTLDR-Data/SciTLDR-A"
_COMVE = (
    "wangcunxiang/SemEval2020-Task4-Commonsense-Validation-and-Explanation"
    "@c55b1a9e6cb66997675f85073e17a9522cf38c2c"
)
_CREAK = "yasumasaonoe/creak@5e892b28b6dad3e87769cfc01f00a6577ca44068"
_CSQA2 = "allenai/csqa2@3f57a4a6a1d51fe6a9b462b59be67c08d41fdc39"
_NUMERSENSE = "INK-USC/NumerSense@c5cd7347bceb3698556c3aa1f0e8489d3d827098"
_STRATEGYQA = "eladsegal/strategyqa@1ba1e97452e189569357876f2854b01357ffbe37"
_COPA = "drwiner/COPA@0d59e0efc834004be53ba7569a7793ea8fb13741"

# What the built-in groups call ../tokenizers/<name>: by name, its Hub id.
TOKENIZERS = {
    "t5": "google-t5/t5-base",
    "bert-uncased": "google-bert/bert-base-uncased",
    "starcoder": "bigcode/starcoderbase-1b",
}

SETS = {
    "nq": PublicSet(
        "2,655 development questions of Natural Questions, each with its passage of Wikipedia "
        "(Liu et al. 2023, Lost in the Middle)",
        "repository MIT; text CC BY-SA 3.0",
        (
            _github(
                "nq-open-oracle.jsonl.gz",
                "nelson-liu/lost-in-the-middle@dc5c20a60a52c46cce60d13c659f698c1343596e",
                "qa_data/nq-open-oracle.jsonl.gz",
                "6a7f72b846f663a133ef952244e5a4e43f06bcf190afe34e8fbe687ce0d1653e",
            ),
        ),
        layout="natural questions",
        groups=("retriever_nq_cpu", "fid_nq_cpu", "lm_nq_cpu", "crossattn_nq_cpu"),
    ),
    "scifact": PublicSet(
        "5,183 abstracts and 1,109 claims about them, as BEIR gives them (Wadden et al. 2020)",
        "claims CC BY 4.0, abstracts ODC-By 1.0",
        (
            PublicFile(
                "scifact.zip",
                "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/scifact.zip",
                "536e14446a0ba56ed1398ab1055f39fe852686ecad24a6306c80c490fa8e0165",
            ),
        ),
        layout="scifact",
        groups=("retriever_scifact_cpu", "retriever_minilm_scifact"),
    ),
    "scitldr": PublicSet(
        "abstracts of papers with summaries of one sentence (Cachola et al. 2020)",
        "Apache-2.0",
        (
            _github(
                "train.jsonl",
                "allenai/scitldr@1ab65db149b641766154436f0f3860ad586f869d",
                f"{_SCITLDR}/train.jsonl",
                "b222771d387be585cfdf5ae957b36757138415a352e0a3e3b23f73f87c3b1119",
            ),
            _github(
                "dev.jsonl",
                "allenai/scitldr@335d4cb6dab71adce37b091ef5767d76d736d36c",
                f"{_SCITLDR}/dev.jsonl",
                "3191fa98ccc09521332b7a1cd63b1930be4e8df125a235ccd31e40329709525e",
            ),
            _github(
                "test.jsonl",
                "allenai/scitldr@335d4cb6dab71adce37b091ef5767d76d736d36c",
                f"{_SCITLDR}/test.jsonl",
                "fb42dd6cd4f4a1928ae8a01a189456fbfe994a07e938bd49f68653933f6503c9",
            ),
        ),
        groups=("summarise_scitldr_cpu",),
    ),
    "creak": PublicSet(
        "claims about entities, true or false (Onoe et al. 2021)",
        "MIT",
        (
            _github(
                "train.json",
                _CREAK,
                "data/creak/train.json",
                "f71b4fa370bbbd7f4b5fc32b82231c18f9e68911c00fc513be0075dea9b90d90",
            ),
            _github(
                "dev.json",
                _CREAK,
                "data/creak/dev.json",
                "de61800bb7d0c07a9d5b8abdf4c1604db21151bdfcb13a284db112a531bf3455",
            ),
            _github(
                "contrast_set.json",
                _CREAK,
                "data/creak/contrast_set.json",
                "0fbcf6765ed967f812229941bfa81a4b66269b22fd41d07926c2ea7c53039725",
            ),
        ),
        groups=("vera_cpu",),
    ),
    "csqa2": PublicSet(
        "questions of common sense, yes or no (Talmor et al. 2021)",
        "CC BY 4.0",
        (
            _github(
                "csqa2_train.json",
                _CSQA2,
                "dataset/CSQA2_train.json.gz",
                "5fdff27d115c4d03d8e420ebf1fc8b53815f16160848dfc3e10f17328f6ddfd1",
            ),
            _github(
                "csqa2_dev.json",
                _CSQA2,
                "dataset/CSQA2_dev.json.gz",
                "1a0b18dfb4a8ec73e0ba5872df2126e53d004e69b9e78999777990b9a4892688",
            ),
        ),
    ),
    "codah": PublicSet(
        "endings of sentences (Chen et al. 2019)",
        "ODC-By 1.0",
        (
            _github(
                "full_data.tsv",
                "Websail-NU/CODAH@acf7ffa4041ade86c6f7dd2f92fb08c957350280",
                "data/full_data.tsv",
                "96689f2abf2f09eb91af50e2d8f92bb553e157601908a1cee83fe68670b5c3ea",
            ),
        ),
    ),
    "comve_a": PublicSet(
        "pairs of statements, one of which makes no sense (Wang et al. 2020)",
        "CC BY-SA 4.0",
        (
            _github(
                "subtaskA_train_data.csv",
                _COMVE,
                "ALL data/Training  Data/subtaskA_data_all.csv",
                "e0f0dca581e92d6f97a819f44a3157058741e1c9dc92fd036f91bf3adf382215",
            ),
            _github(
                "subtaskA_train_gold.csv",
                _COMVE,
                "ALL data/Training  Data/subtaskA_answers_all.csv",
                "8a30a09dcfcdc536d03201bea976708dff3813691667a3c1a346af15bfabbc69",
            ),
            _github(
                "subtaskA_dev_data.csv",
                _COMVE,
                "ALL data/Dev Data/subtaskA_dev_data.csv",
                "60f32177d667016e4ca2513fe75113f4e30b8336e3d3c5b8de4bcedfa53571bc",
            ),
            _github(
                "subtaskA_dev_gold.csv",
                _COMVE,
                "ALL data/Dev Data/subtaskA_gold_answers.csv",
                "405e8a28b1d79c19deb7855d44c46e9ac2e5d0d09dd2280476b21341fa492a95",
            ),
        ),
        groups=("vera_cpu",),
    ),
    "numersense": PublicSet(
        "sentences whose number is masked (Lin et al. 2020)",
        "MIT",
        (
            _github(
                "train.masked.tsv",
                _NUMERSENSE,
                "data/train.masked.tsv",
                "34cd706f4070907b8a9fa7200504bea099a6f34a343e282ae4f3a987ecd63d95",
            ),
            _github(
                "validation.masked.tsv",
                _NUMERSENSE,
                "data/validation.masked.tsv",
                "2859e959e533ccdd9f7e2666425787f266cef300e183834d55a1324b69874b44",
            ),
        ),
    ),
    "strategyqa": PublicSet(
        "questions whose answer takes several steps, yes or no (Geva et al. 2021)",
        "MIT",
        (
            _github(
                "train.json",
                _STRATEGYQA,
                "data/strategyqa/train.json",
                "0f72560b8a6fad3db847d2f1a7524fb087297843bb45a8d3245ffd68cbe0de12",
            ),
            _github(
                "dev.json",
                _STRATEGYQA,
                "data/strategyqa/dev.json",
                "0d94842ffb022db8fd5ecd2168b785d5cf67f6faf64f665476bad544a3eb9dde",
            ),
        ),
    ),
    "wsc273": PublicSet(
        "Winograd schemas (Levesque et al. 2012)",
        "CC BY 4.0",
        (
            _github(
                "WSCollection.xml",
                "panda0881/e2e-coref@4a5d0b19e5ac11b9a7d585d1da9c2f71d6b55e48",
                "WSCollection.xml",
                "8d72fe16331cfcddfc2f8ec6f87c5a07e186f913e023705a998a5cc6011994e4",
            ),
        ),
    ),
    "copa": PublicSet(
        "causes and effects of a premise (Roemmele et al. 2011)",
        "commonly given as BSD-2-Clause; the repository that it is read from names none",
        (
            _github(
                "copa-dev.xml",
                _COPA,
                "datasets/copa-dev.xml",
                "6251d7d99de4cbc6a2c3323923213e5e73071d286039b97a0908736e2be093bc",
            ),
            _github(
                "copa-test.xml",
                _COPA,
                "datasets/copa-test.xml",
                "640824681bde78a7592726504d7d9bab294e5de26072d973307fa80d34919d92",
            ),
        ),
    ),
}
