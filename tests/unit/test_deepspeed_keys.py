"""trainer/config/deepspeed_config/ against the programs that read its files: DeepSpeed itself and
the Hugging Face Trainer.

An upgrade of DeepSpeed that adds, removes or retypes a key fails here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_deepspeed_config import PRESETS, autos, build, preset
from trainer.config import deepspeed_config as dc
from trainer.config.deepspeed_config.keys import LEGAL, REFUSED, VERSION


@pytest.fixture(scope="module")
def blocks() -> dict[str, Any]:
    """DeepSpeed's own models of the blocks that it checks, by their place in the file."""
    pytest.importorskip("deepspeed")
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config, leaf_module_config, offload_config
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "zero_optimization": config.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.leaf_module": leaf_module_config.DeepSpeedZeroLeafModuleConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "wandb": WandbConfig,
        "comet": CometConfig,
        "compile": CompileConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }


def test_the_table_was_read_from_the_installed_version() -> None:
    from importlib.metadata import version

    assert version("deepspeed") == VERSION, (
        "read the source again, and update trainer/config/deepspeed_config/keys.py"
    )


def test_the_table_has_exactly_the_fields_of_deepspeeds_models(blocks: dict[str, Any]) -> None:
    for path, model in blocks.items():
        theirs = {field.alias or name for name, field in model.model_fields.items()}
        refused = {name.rpartition(".")[2] for name in REFUSED if name.rpartition(".")[0] == path}
        assert set(LEGAL[path]) | (refused & theirs) == theirs, path


def test_the_table_has_the_types_of_deepspeeds_models(blocks: dict[str, Any]) -> None:
    kinds = {
        "b": "bool",
        "i": "int",
        "n": "float",
        "s": "str|Path|OffloadDeviceEnum",
        "l": "list|List",
    }
    for path, model in blocks.items():
        fields = {
            field.alias or name: str(field.annotation) for name, field in model.model_fields.items()
        }
        for key, kind in LEGAL[path].items():
            if key == "stage" or kind[0] == "o":
                continue
            assert any(word in fields[key] for word in kinds[kind[0]].split("|")), (
                path,
                key,
                kind,
                fields[key],
            )
            assert ("Optional" in fields[key] or "None" in fields[key]) == kind.endswith("?"), (
                path,
                key,
                kind,
            )


def test_the_table_has_every_top_level_constant_of_deepspeed() -> None:
    constants = pytest.importorskip("deepspeed.runtime.constants")
    known = {*LEGAL[""], *REFUSED}
    defaults = [
        name.removesuffix("_DEFAULT") for name in vars(constants) if name.endswith("_DEFAULT")
    ]
    values = {getattr(constants, name, None) for name in defaults}
    nested = {key for keys in LEGAL.values() for key in keys} | {
        "type",
        "legacy_fusion",
        "lower_precision_safe_modules",
    }
    nested |= {
        "bf16_master_weights_and_grads",
        "check_overflow",
    }  # of blocks; the second is gone from the bf16 model
    assert {value for value in values if isinstance(value, str)} <= known | nested


def test_removed_keys_are_those_that_deepspeed_names() -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    removed = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    removed |= {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    assert removed <= REFUSED.keys()


TRAINABLE = [(name, precision) for name in PRESETS for precision in ("fp32", "bf16", "fp16")]
TRAINABLE.remove(("zero0", "fp16"))  # refused: see test_deepspeed_config.py


@pytest.mark.parametrize(("name", "precision"), TRAINABLE)
def test_deepspeed_reads_back_what_was_asked_for(name: str, precision: str, tmp_path: Path) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    file = preset(name, tmp_path)
    file["zero_optimization"].pop("zero_hpz_partition_size", None)  # of one rank there is no group
    built = build(file, precision=precision, world=1, global_batch=32)
    theirs = config.DeepSpeedConfig(dc.for_engine(built))
    assert theirs.zero_optimization_stage == built["zero_optimization"]["stage"]
    assert (theirs.train_batch_size, theirs.gradient_accumulation_steps) == (4, 1)
    assert theirs.managed_gradient_accumulation is False
    assert theirs.bfloat16_config.enabled == (precision == "bf16")
    assert theirs.float16_config.enabled == (precision == "fp16")
    assert theirs.gradient_clipping == (0.0 if (name, precision) == ("zero0", "fp32") else 0.5)


@pytest.mark.parametrize("name", PRESETS)
def test_the_hugging_face_trainer_takes_the_same_files(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.deepspeed import (
        HfTrainerDeepSpeedConfig,
        unset_hf_deepspeed_config,
    )

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    model = transformers.GPTBigCodeForCausalLM(
        transformers.GPTBigCodeConfig(n_embd=8, n_layer=1, n_head=2, vocab_size=32, n_positions=8)
    )
    try:
        config = HfTrainerDeepSpeedConfig(preset(name, tmp_path))
        config.trainer_config_process(args)
        config.trainer_config_finalize(args, model, num_training_steps=10)
    finally:
        unset_hf_deepspeed_config()
    assert autos(config.config) == []
    assert config.config["train_batch_size"] == 8 * args.world_size
    assert config.config["bf16"]["enabled"] is True
