"""exp_configs.py: the published table, ids that stay, the runnable groups, and files of the
user.
"""

from __future__ import annotations

import copy
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

import exp_configs
from exp_configs import EXP_GROUPS, cartesian_exp_group, read_groups, vary
from tests.wording import Fault, fault, refused
from trainer import tasks
from trainer.config import deepspeed_config
from trainer.config.identity import exp_id

ALL = [(group, values) for group, experiments in EXP_GROUPS.items() for values in experiments]

# ServiceNow/xc-cache, last commit: base; layers x stride, shared weights, after the block, shared
# query/key, width, heads, key dropout; context; micro x accumulation on 8 devices; lr, weight
# decay, shape; precision, checkpointing.
TABLE = """
santacoder             TabbyML/SantaCoder-1B     6x2 yes no  no  -    -  .3  2048 5x8  3e-4 5e-4 cosine fp16 no
starcoder              bigcode/starcoder         8x4 yes no  no  -    -  .3  2048 1x16 6e-4 5e-2 linear fp16 no
starcoderbase-1b       bigcode/starcoderbase-1b  6x3 no  no  no  -    -  .3  128  1x1  3e-4 5e-1 cosine fp16 no
starcoderbase-1b-early bigcode/starcoderbase-1b  6x3 yes no  no  -    -  .3  2048 2x1  2e-4 5e-1 reduce_on_plateau fp16 yes
starcoderbase-3b       bigcode/starcoderbase-3b  6x6 no  yes no  1024 16 .4  4096 4x32 5e-4 1e-3 cosine fp16 no
starcoderbase-7b       bigcode/starcoderbase-7b  8x4 yes yes yes 1024 8  .4  2048 1x32 1e-4 1e-2 cosine fp16 no
starchat-alpha         HuggingFaceH4/starchat-alpha 4x8 no yes yes 2048 32 .25 4096 1x32 2e-4 1e-2 cosine bf16 yes
tulu-7b                allenai/tulu-2-dpo-7b     4x6 no  yes no  1024 32 .1  6144 1x32 2e-4 0    linear bf16 yes
tulu-13b               allenai/tulu-2-dpo-13b    4x6 no  yes no  1024 32 .1  6144 1x32 2e-4 0    linear bf16 yes
tulu-7b_2x8            allenai/tulu-2-dpo-7b     2x8 no  yes no  1024 32 .2  6144 1x32 2e-4 1e-3 cosine bf16 yes
tulu-7b_8x2            allenai/tulu-2-dpo-7b     8x2 no  yes no  1024 32 .2  6144 1x32 2e-4 1e-3 cosine bf16 yes
tulu-7b_8x3            allenai/tulu-2-dpo-7b     8x3 no  yes no  1024 32 .2  6144 1x32 2e-4 1e-3 cosine bf16 yes
mistral-7b             mistralai/Mistral-7B-Instruct-v0.2 4x6 no yes no 1024 32 .1 6144 1x32 2e-4 0 linear bf16 yes
llama-7b               meta-llama/Llama-2-7b-hf  4x6 no  yes no  1024 32 .1  6144 1x32 2e-4 0    linear bf16 yes
llama-13b              meta-llama/Llama-2-13b-hf 4x6 no  yes no  1024 32 .1  6144 1x32 2e-4 0    linear bf16 yes
"""
ROWS = [line.split() for line in TABLE.strip().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_published_group_has_its_published_values(row: list[str]) -> None:
    name, base, slots, shared, after, projections, width, heads, drop, context, batch, *rest = row
    lr, decay, shape, precision, checkpointing = rest
    (values,) = EXP_GROUPS[f"crossattn_{name}"]
    count, stride = (int(number) for number in slots.split("x"))
    micro, accumulation = (int(number) for number in batch.split("x"))
    assert values["base"] == base
    # Published code on Llama and Mistral: cross_attn_dropout_prob drops probabilities, and Mistral
    # ignores the heads.
    is_rotary = name.startswith(("tulu", "llama", "mistral"))
    dropout = (
        {"key_dropout": 0.0, "attention_dropout": float(drop)}
        if is_rotary
        else {"key_dropout": float(drop)}
    )
    is_mistral = name == "mistral-7b"
    assert values["layers"] == {
        "count": count,
        "stride": stride,
        "shared_weights": shared == "yes",
        "after": after == "yes",
        "shared_projections": projections == "yes",
        "width": None if width == "-" else int(width),
        "heads": None if heads == "-" or is_mistral else int(heads),
        "initialisation": "published",
        **dropout,
        **({"base_attention": True} if is_mistral else {}),
    }
    assert values["train"] == {
        "steps": 500_000,
        "micro_batch": micro,
        "global_batch": micro * accumulation * 8,
        "precision": precision,
        "gradient_checkpointing": checkpointing == "yes",
    }
    published = {"betas": [0.9, 0.95], "eps": 1e-6, "clip": 1.0}
    assert values["optim"] == {"lr": float(lr), "weight_decay": float(decay), **published}
    warmup = None if shape == "reduce_on_plateau" else 0.05  # transformers gives that schedule none
    assert values["schedule"] == {"shape": shape, "warmup_ratio": warmup}
    of_dataset = {"starcoderbase-1b": "nq", "starcoderbase-1b-early": "all"}
    subset = {"training_data_subset": of_dataset[name]} if name in of_dataset else {}
    assert values["data"] == {
        "source": "jsonl",
        "template": {"mistral-7b": "mistral", "starcoderbase-1b-early": "plain"}.get(name, "chat"),
        "decoder_tokens": int(context),
        "context_tokens": int(context),
        "loss_on": "all",
        "include_context_ids": True,
        **subset,
    }
    assert values["deepspeed"] == "zero2"


@pytest.mark.parametrize(
    ("group", "base", "lr", "files"),
    [
        ("fid_nq_base", "google-t5/t5-base", 1e-4, "NQ"),
        ("fid_nq_large", "google-t5/t5-large", 5e-5, "NQ"),
        ("fid_tqa_base", "google-t5/t5-base", 1e-4, "TQA"),
        ("fid_tqa_large", "google-t5/t5-large", 5e-5, "TQA"),
    ],
)
def test_a_reader_is_trained_by_the_published_recipe(
    group: str, base: str, lr: float, files: str
) -> None:
    (values,) = EXP_GROUPS[group]
    train, data = values["train"], values["data"]
    assert (values["base"], values["optim"]) == (
        base,
        {"lr": lr, "weight_decay": 0.01, "decay": "all", "clip": 1.0},
    )
    assert values["schedule"] == {"shape": "linear", "warmup_steps": 1000}
    assert (train["steps"], train["global_batch"], train["eval_every"]) == (15_000, 64, 500)
    assert (train["answers"], train["best"], train["best_is"]) == ("all", "valid/em", "max")
    assert (data["contexts"], data["passage_tokens"]) == (100, 250)
    assert set(data["files"].values()) == {
        f"{files}/{name}.json" for name in ("train", "dev", "test")
    }


def test_the_cheaper_reader_reads_25_passages_and_then_100_for_1000_updates() -> None:
    first, second = EXP_GROUPS["fid_nq_base_25to100"]
    assert (first["data"]["contexts"], second["data"]["contexts"]) == (25, 100)
    assert second["base"] == {"experiment": first}
    assert second["train"]["steps"] == 1000


def test_every_published_group_is_in_the_table() -> None:
    published = {group for group, values in ALL if values["data"]["source"] == "jsonl"}
    assert published == {f"crossattn_{row[0]}" for row in ROWS}


@pytest.mark.parametrize(("group", "values"), ALL, ids=[group for group, _ in ALL])
def test_a_group_parses(group: str, values: dict[str, Any]) -> None:
    assert tasks.parse(values, source=group).task == values["task"]


@pytest.mark.parametrize(("group", "values"), ALL, ids=[group for group, _ in ALL])
def test_a_group_has_a_deepspeed_dictionary_on_one_and_on_eight_devices(
    group: str, values: dict[str, Any]
) -> None:
    cfg = tasks.parse(values)
    preset = deepspeed_config.read(cfg.deepspeed)
    worlds = [1, 8] if values["data"]["source"] == "jsonl" else [1, 2]
    for world in worlds:
        if world * cfg.train.micro_batch > cfg.train.global_batch:
            continue  # published for one device
        assert deepspeed_config.build(
            preset, train=cfg.train, optim=cfg.optim, world=world, source=group
        )


def test_no_two_experiments_are_the_same() -> None:
    """But one that several groups begin with: those name the very same dictionary."""
    named = {id(values): exp_id(values) for _, values in ALL}
    assert len(set(named.values())) == len(named)
    ends = [exp_id(values[-1]) for values in EXP_GROUPS.values()]
    assert len(set(ends)) == len(ends)


def test_the_id_of_the_documented_group_does_not_change_by_accident() -> None:
    """Run folders carry this name: whoever changes it on purpose orphans the folders of
    that group.
    """
    (values,) = EXP_GROUPS["crossattn_starcoderbase-3b"]
    assert exp_id(values) == "ff46c271ec075a4e9f18a4eaec9126ea"


def test_dictionaries_survive_json() -> None:
    assert json.loads(json.dumps(EXP_GROUPS)) == EXP_GROUPS


def test_a_tiny_group_exists_for_every_task() -> None:
    tiny = {values["task"] for group, values in ALL if group.endswith("_tiny")}
    assert tiny == set(tasks.names())


def test_an_embedded_tokenizer_fits_its_random_base() -> None:
    own = [values for _, values in ALL if isinstance(values.get("tokenizer"), dict)]
    assert own
    for values in own:
        assert values["tokenizer"]["vocab_size"] == values["base"]["config"]["vocab_size"]


def test_a_random_base_says_its_architecture() -> None:
    random = [v["base"]["config"] for _, v in ALL if "config" in (v.get("base") or ())]
    assert random
    assert all(config.get("model_type") for config in random)


def test_the_tokens_fit_the_positions_of_a_random_base() -> None:
    for group, values in ALL:
        base = values["base"]
        while isinstance(base, dict) and "experiment" in base:
            base = base["experiment"]["base"]
        config = base["config"] if isinstance(base, dict) else {}
        if "n_positions" in config:
            data = values["data"]
            longest = max(
                data[key]
                for key in ("max_tokens", "decoder_tokens", "context_tokens")
                if key in data
            )
            assert longest <= config["n_positions"], group
            assert config["n_embd"] % config["n_head"] == 0, group


def test_the_cross_attention_on_natural_questions_starts_from_its_language_model() -> None:
    (values,) = EXP_GROUPS["crossattn_nq_cpu"]
    assert values["base"] == {"experiment": EXP_GROUPS["lm_nq_cpu"][0]}


# vary


def test_vary_merges_a_block_one_level_deep() -> None:
    assert vary({"a": {"x": 1, "y": {"z": 1}}, "b": 2}, a={"y": {"w": 2}}) == {
        "a": {"x": 1, "y": {"w": 2}},
        "b": 2,
    }


def test_vary_shares_nothing_with_its_parent() -> None:
    parent = {"a": {"x": [1]}, "b": [2]}
    before = copy.deepcopy(parent)
    child = vary(parent, c={"k": 1})
    child["a"]["x"].append(3)
    child["b"].append(3)
    assert parent == before


def test_vary_replaces_a_base_as_a_whole() -> None:
    assert vary({"base": {"config": {}}}, base={"experiment": {"task": "t"}}) == {
        "base": {"experiment": {"task": "t"}}
    }


# cartesian_exp_group; tests/jobs/test_haven.py compares it with haven's own


def test_a_product_runs_over_the_lists_and_its_last_key_varies_fastest() -> None:
    assert cartesian_exp_group({"a": [1, 2], "b": "x", "c": [3, 4]}) == [
        {"a": 1, "b": "x", "c": 3},
        {"a": 1, "b": "x", "c": 4},
        {"a": 2, "b": "x", "c": 3},
        {"a": 2, "b": "x", "c": 4},
    ]


def test_a_hyper_parameter_that_is_a_list_is_written_in_two_brackets() -> None:
    assert cartesian_exp_group({"betas": [[0.9, 0.95]], "empty": [[]]}) == [
        {"betas": [0.9, 0.95], "empty": []}
    ]


def test_lists_inside_a_block_are_no_axes() -> None:
    assert cartesian_exp_group({"optim": {"betas": [0.9, 0.95]}}) == [
        {"optim": {"betas": [0.9, 0.95]}}
    ]


def test_none_is_a_value_unless_it_is_to_be_left_out() -> None:
    form = {"a": [None, 1], "b": None}
    assert cartesian_exp_group(form) == [{"a": None, "b": None}, {"a": 1, "b": None}]
    assert cartesian_exp_group(form, remove_none=True) == [{}, {"a": 1}]


def test_an_axis_without_values_is_named() -> None:
    with refused("axis_empty", key="'b', 'c'"):
        cartesian_exp_group({"a": 1, "b": [], "c": []})


def test_the_experiments_of_a_product_share_nothing() -> None:
    form = {"seed": [1, 2], "optim": {"betas": [0.9]}}
    first, second = cartesian_exp_group(form)
    first["optim"]["betas"].append(1)
    assert second["optim"] == form["optim"] == {"betas": [0.9]}


# Files of the user


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_without_a_file_the_groups_are_our_own() -> None:
    assert read_groups(None) == exp_configs.EXP_GROUPS


def test_a_file_may_vary_our_groups(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        from exp_configs import CROSSATTN_TINY, vary
        EXP_GROUPS = {"sweep": [vary(CROSSATTN_TINY, optim={"lr": lr}) for lr in (1e-3, 2e-3)]}
        """,
    )
    assert [values["optim"]["lr"] for values in read_groups(path)["sweep"]] == [1e-3, 2e-3]


def test_a_group_given_as_a_dictionary_is_a_product(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        from exp_configs import CROSSATTN_TINY
        EXP_GROUPS = {"sweep": {**CROSSATTN_TINY, "optim": [{"lr": 1e-3}, {"lr": 2e-3}]}}
        """,
    )
    first, second = read_groups(path)["sweep"]
    assert (first["optim"], second["optim"]) == ({"lr": 1e-3}, {"lr": 2e-3})
    assert first["train"] == second["train"] == exp_configs.CROSSATTN_TINY["train"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "x = 1\ny = x.z\n",
            fault(
                "python_file_fails",
                file="mine.py",
                line=2,
                error="AttributeError: 'int' object has no attribute 'z'",
            ),
        ),
        (
            "x = 1\n\ndef broken(:\n",
            fault("python_file_fails", file="mine.py", line=3, error="SyntaxError"),
        ),
        (
            "import no_such_module\n",
            fault(
                "python_file_fails",
                file="mine.py",
                line=1,
                error="ModuleNotFoundError: No module named 'no_such_module'",
            ),
        ),
        (
            "import json\n\njson.loads('{')\n",
            fault("python_file_fails", file="mine.py", line=3, error="JSONDecodeError"),
        ),
        (
            "x = 1\n\ncompile('(', 'other.py', 'exec')\n",
            fault("python_file_fails", file="mine.py", line=3, error="SyntaxError"),
        ),
        (
            "\nraise SystemExit\n",
            fault("python_file_fails", file="mine.py", line=2, error="SystemExit"),
        ),
        ("x = 1\n", fault("dictionary_wanted", name="EXP_GROUPS", kind="missing or None")),
        ("EXP_GROUPS = {}\n", fault("dictionary_wanted", name="EXP_GROUPS", kind="an empty dict")),
        ("EXP_GROUPS = [{}]\n", fault("dictionary_wanted", name="EXP_GROUPS", kind="a list")),
        ("EXP_GROUPS = {'a': []}\n", fault("group_empty", name="EXP_GROUPS['a']")),
        (
            "EXP_GROUPS = {'a': 'x'}\n",
            fault("group_kind", name="EXP_GROUPS['a']", kind="str"),
        ),
        (
            "EXP_GROUPS = {'a': {'task': 'x', 'seed': []}}\n",
            fault("axis_empty", key="EXP_GROUPS['a'] 'seed'"),
        ),
        ("EXP_GROUPS = {'a': {'x': []}, 'b': 3}\n", fault("mistakes", count=2)),
        (
            "EXP_GROUPS = {'a': [{}, 3]}\n",
            fault("dictionary_wanted", name="EXP_GROUPS['a'] [1]", kind="an int"),
        ),
        ("EXP_GROUPS = {1: [{}]}\n", fault("group_name", name="EXP_GROUPS[1]", kind="int")),
        ("EXP_GROUPS = {'a': [], 'b': 3}\n", fault("mistakes", count=2)),
    ],
)
def test_a_fault_of_the_file_is_named_with_its_place(
    tmp_path: Path, text: str, complaint: Fault
) -> None:
    with refused(complaint):
        read_groups(written(tmp_path, text))


def test_a_file_that_changes_its_folder_moves_no_relative_path(tmp_path: Path) -> None:
    here = Path.cwd()
    path = written(
        tmp_path, f"import os\nos.chdir({str(tmp_path)!r})\nEXP_GROUPS = {{'a': [{{}}]}}"
    )
    assert read_groups(path) == {"a": [{}]}
    assert Path.cwd() == here


def test_a_file_named_from_the_working_folder_has_its_lines_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "x = 1\ny = x.z\n")
    monkeypatch.chdir(tmp_path)
    with refused("python_file_fails", file="mine.py", line=2, error="AttributeError"):
        read_groups(Path("mine.py"))


def test_what_a_file_prints_does_not_get_among_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read_groups(written(tmp_path, "print('hello')\nEXP_GROUPS = {'a': [{}]}"))
    assert capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize("name", ["missing.yaml", "missing.json", "folder.yaml"])
def test_a_file_of_groups_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with refused("group_file_unreadable", at=str(tmp_path / name)):
        read_groups(tmp_path / name)


@pytest.mark.parametrize("name", ["missing.py", "groups.toml"])
def test_what_is_no_python_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "groups.toml").write_text("")
    with refused("python_file_wanted", flag="--exp_configs"):
        read_groups(tmp_path / name)


def test_steps_reach_a_base_that_is_an_experiment_of_the_same_group() -> None:
    first, second = exp_configs.experiments_of("fid_nq_base_25to100", None, 10)
    assert first["train"]["steps"] == second["train"]["steps"] == 10
    assert second["base"] == {"experiment": first}
    (alone,) = exp_configs.experiments_of("crossattn_nq_cpu", None, 10)
    assert alone["base"] == {"experiment": EXP_GROUPS["lm_nq_cpu"][0]}, (
        "that one was trained as it stands"
    )
