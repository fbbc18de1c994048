"""What `benchmarks/gpu.py` trains: published shapes with random weights on made-up rows, and the
same at a size for a rehearsal. Nothing is downloaded. Imports no torch.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Values = dict[str, Any]
ROWS, VALID_ROWS = 96, 4
VOCABULARY = 2048
_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
_T5 = {"model_type": "t5", "vocab_size": 32128, "decoder_start_token_id": 1}
_T5 |= {"eos_token_id": 0, "pad_token_id": 1}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def bigcode(width: int, blocks: int, heads: int) -> Values:
    """A StarCoderBase's shape. Source: their config.json."""
    config = {"model_type": "gpt_bigcode", "n_embd": width, "n_layer": blocks, "n_head": heads}
    return config | {"n_inner": 4 * width, "n_positions": 8192, "vocab_size": 49152} | _ENDS


def t5(width: int, of_head: int, inner: int, blocks: int, heads: int, **more: Any) -> Values:
    sizes = {"d_model": width, "d_kv": of_head, "d_ff": inner, "num_layers": blocks}
    return _T5 | sizes | {"num_heads": heads} | more


BERT = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "pad_token_id": 1,
}
QWEN = {  # Qwen3-Embedding-0.6B's
    "model_type": "qwen3",
    "vocab_size": 151669,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
} | _ENDS
_LLAMA_8B = {  # Llama-3.1-8B's
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
} | _ENDS
_QWEN_7B = {  # Qwen2.5-7B's
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
} | _ENDS
_SMALLER = {
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 2,
    "n_inner": 64,
    "n_positions": 256,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Shape:
    """One experiment: a base, a task and its lengths."""

    name: str
    task: str
    config: Values
    blocks: dict[str, Values] = field(default_factory=dict)  # of the dictionary
    micro_batch: int = 8
    is_prepared: bool = False  # encoder states are computed and stored first
    train: Values = field(default_factory=dict)  # of that block
    limit_s: float = 150

    def experiment(self, *, is_rehearsed: bool, **train: Any) -> Values:
        config = self.config
        blocks = json.loads(json.dumps(self.blocks))
        micro_batch = self.micro_batch
        if is_rehearsed:
            config = config | {name: n for name, n in _SMALLER.items() if name in config}
            micro_batch = 2
            for name, value in blocks.get("data", {}).items():
                if isinstance(value, int) and name.endswith("_tokens"):
                    blocks["data"][name] = min(value, 32 if name != "passage_tokens" else 24)
            if "contexts" in blocks.get("data", {}):
                blocks["data"]["contexts"] = 3
            if "layers" in blocks:
                blocks["layers"] |= {"count": 2, "stride": 2}
        plain = {"steps": 1000, "global_batch": 2 * micro_batch, "micro_batch": micro_batch}
        plain |= {"precision": "bf16", "log_every": 4, "eval_every": 1000, "save_every": 1000}
        return {
            "task": self.task,
            "base": {"config": config, "seed": 1},
            "tokenizer": {"vocab_size": VOCABULARY},
            "train": plain
            | {"eval_batch": 4, "seed": 5, "max_lost_labels": 0.99}
            | self.train
            | train,
            "optim": {"lr": 1e-4, "weight_decay": 0.1},
            "schedule": {"shape": "cosine", "warmup_steps": 2},
            "deepspeed": "zero2",
            **blocks,
        }


def _cross_attention(name: str, config: Values, **data: Any) -> Shape:
    layers = {"count": 6, "stride": 4, "initialisation": "published"}
    lengths = {"source": "jsonl", "decoder_tokens": 128, "context_tokens": 4096} | data
    blocks = {"layers": layers, "data": lengths}
    return Shape(name, "cross_attention", config, blocks, 8, data.get("encode") == "cached")


def _fid(name: str, config: Values) -> Shape:
    data = {"source": "fid", "contexts": 100, "passage_tokens": 250, "answer_tokens": 20}
    return Shape(name, "fid", config, {"data": data}, 1)


def _retriever(name: str, config: Values, pooling: str, **more: Any) -> Shape:
    files = {"train": "queries/train.jsonl", "valid": "queries/dev.jsonl"}
    data = {"source": "tevatron", "files": files, "query_tokens": 32, "passage_tokens": 156}
    encoder = {"pooling": pooling, "normalize": True, "temperature": 0.02}
    return Shape(
        name, "retriever", config, {"data": data | {"passages": 8}, "encoder": encoder, **more}, 16
    )


def _summariser(name: str, config: Values, length: int, micro_batch: int) -> Shape:
    data = {"source": "files", "document": "context", "summaries": ["answer"]}
    lengths = {"source_tokens": length, "target_tokens": 128}
    return Shape(name, "summariser", config, {"data": data | lengths}, micro_batch)


def _lora(name: str, config: Values) -> Shape:
    """NeMo AutoModel's LoRA on one H100: rows of 4,096 tokens, 2 at a time and 32 a step, bf16, no
    clipping, dropout .1 of its adapters on all projections. Source: its
    examples/llm_benchmark/llama3_1/llama3_1_8b_peft_benchmark.yaml.
    """
    lora = {"r": 16, "alpha": 32, "dropout": 0.1, "targets": "all-linear"}
    blocks = {"data": {"source": "jsonl", "max_tokens": 4096}, "lora": lora}
    blocks["optim"] = {"lr": 1e-5, "weight_decay": 0.01, "clip": 0.0}
    train = {"global_batch": 32, "log_every": 1}
    return Shape(name, "causal_lm", config, blocks, 2, train=train, limit_s=280)


_STARCODER_3B = bigcode(2816, 36, 22)
_T5_BASE, _T5_3B = t5(768, 64, 3072, 12, 12), t5(1024, 128, 16384, 24, 32)
SHAPES = (
    Shape(
        "causal_lm-1b-4096",
        "causal_lm",
        bigcode(2048, 24, 16),
        {"data": {"source": "jsonl", "max_tokens": 4096}},
        4,
    ),
    _cross_attention("cross_attention-1b", bigcode(2048, 24, 16)),
    _cross_attention("cross_attention-3b", _STARCODER_3B),
    _cross_attention("cross_attention-3b-cached", _STARCODER_3B, encode="cached"),
    _cross_attention("cross_attention-7b", bigcode(4096, 42, 32)),
    _fid("fid-base-100", _T5_BASE),
    _fid("fid-large-100", t5(1024, 64, 4096, 24, 16)),
    Shape(
        "vera-xxl-encoder",
        "vera",
        t5(4096, 64, 10240, 24, 64, **_GATED),
        {
            "data": {
                "source": "groups",
                "train_tasks": ["choices"],
                "valid_tasks": ["choices"],
                "max_tokens": 128,
            }
        },
        8,
    ),
    _retriever("retriever-bert-base", BERT, "cls"),
    _retriever("retriever-0.6b-lora", QWEN, "eos", lora={"r": 16, "targets": "all-linear"}),
    _summariser("summariser-t5-base-512", _T5_BASE, 512, 32),
    _summariser("summariser-t5-base-4096", _T5_BASE, 4096, 4),
    _summariser("summariser-t5-3b-512", _T5_3B, 512, 16),
    _summariser("summariser-t5-3b-4096", _T5_3B, 4096, 2),
    _lora("lora-llama-8b-4096", _LLAMA_8B),
    _lora("lora-qwen-7b-4096", _QWEN_7B),
)
COMPILED = ("vera-xxl-encoder", "cross_attention-3b")  # with compiled blocks besides
ONE_OF_EACH = (
    "causal_lm-1b-4096",
    "cross_attention-1b",
    "fid-base-100",
    "retriever-bert-base",
    "summariser-t5-base-512",
    "vera-xxl-encoder",
)


def write_rows(folder: Path, *, is_rehearsed: bool) -> Path:
    """Rows of made-up words for every task, always the same, with texts that fill the limits."""
    words = random.Random(1)
    rows = ROWS if not is_rehearsed else 24
    long, passage, contexts = (6000, 240, 100) if not is_rehearsed else (60, 20, 3)

    def text(count: int) -> str:
        return " ".join(
            f"{words.choice('bdfgklmnprstvz')}{words.choice('aeiou')}{words.choice('lmnrst')}"
            for _ in range(count)
        )

    for name, count in (("train", rows), ("valid", VALID_ROWS), ("dev", VALID_ROWS)):
        made = []
        for _ in range(count):
            ctxs = [
                {"title": text(2), "text": text(words.randint(passage // 2, passage))}
                for _ in range(contexts)
            ]
            whole = text(words.randint(long // 2, long))
            made.append(
                {
                    "question": text(12),
                    "answer": text(6),
                    "context": whole,
                    "text": whole,
                    "ctxs": ctxs,
                }
            )
        if name != "dev":
            _write(folder / f"{name}.jsonl", made)
        queries = [
            {
                "query_id": f"q{n}",
                "query": text(10),
                "positive_passages": [{"docid": f"{n}", "title": text(2), "text": text(passage)}],
                "negative_passages": [
                    {"docid": f"{n}-{m}", "title": text(2), "text": text(passage)} for m in range(7)
                ],
            }
            for n in range(count)
        ]
        _write(folder / "queries" / f"{name}.jsonl", queries)
        choices = [
            {"golds": [text(16)], "distractors": [text(16) for _ in range(3)]} for _ in range(count)
        ]
        (folder / "choices").mkdir(parents=True, exist_ok=True)
        (folder / "choices" / f"{name}.json").write_text(json.dumps(choices))
    return folder


def _write(file: Path, rows: list[Values]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
