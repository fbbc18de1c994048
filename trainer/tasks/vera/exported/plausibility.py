"""How plausible a statement is, by the verifier in this folder. Lathe writes this file beside the
weights that it exports; it imports torch and transformers alone (and peft for adapters).

    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    Scorer = get_class_from_dynamic_module("plausibility.PlausibilityScorer", FOLDER)
    scorer = Scorer.from_pretrained(FOLDER)  # a folder or a Hub id
    print(scorer(["Ice is cold.", "Ice is hot."]))  # 0 to 1, the temperature of calibration applied
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding, AutoTokenizer
from transformers.utils.hub import cached_file

_T5 = ("t5", "mt5", "umt5")  # of which the encoder alone is read


class PlausibilityScorer:
    """An encoder, or a decoder's body, and a linear head on the last token of a statement."""

    def __init__(
        self, encoder: Any, tokenizer: Any, head: dict[str, Tensor], said: dict[str, Any]
    ) -> None:
        """said: vera.json, with the temperature and the most tokens of a statement."""
        self.encoder, self.tokenizer, self.head = encoder.eval(), tokenizer, head
        self.temperature, self.max_tokens = said["temperature"], said.get("max_tokens", 128)

    @classmethod
    def from_pretrained(cls, name: str, *, device: str = "cpu", **hub: Any) -> PlausibilityScorer:
        """The verifier in a folder or on the Hub. hub: revision, token, cache_dir, ..."""

        def content(file: str) -> dict[str, Any]:
            path = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **hub)
            return {} if path is None else json.loads(Path(path).read_text())

        adapter = content("adapter_config.json")
        base = adapter.get("base_model_name_or_path") if adapter else name
        if base is None:
            raise ValueError(f"{name} holds adapters, and does not name the base they belong to")
        of_base = {} if adapter else hub
        config = AutoConfig.from_pretrained(base, **of_base)
        build = AutoModelForTextEncoding if config.model_type in _T5 else AutoModel
        how: dict[str, Any] = {"output_loading_info": True, **of_base}
        if getattr(config, "attn_logit_softcapping", None):
            how["attn_implementation"] = "eager"  # transformers 4: sdpa leaves the cap out
        encoder, report = build.from_pretrained(base, **how)
        if report["missing_keys"]:  # transformers would fill them with random numbers
            raise ValueError(f"{base}: its files lack {sorted(report['missing_keys'])}")
        if adapter:
            encoder.load_adapter(name)
        file = cached_file(name, "head.safetensors", **hub)
        head = {key: tensor.float().to(device) for key, tensor in load_file(str(file)).items()}
        tokenizer = AutoTokenizer.from_pretrained(name, **hub)
        return cls(encoder.to(device), tokenizer, head, content("vera.json"))

    def __call__(self, statements: str | Sequence[str], *, batch: int = 64) -> list[float]:
        """How plausible each statement is, 0 to 1, in their order."""
        logits = self.logits(statements, batch=batch).double() / self.temperature
        return logits.float().double().sigmoid().float().tolist()

    @torch.no_grad()
    def logits(self, statements: str | Sequence[str], *, batch: int = 64) -> Tensor:
        """(N,) fp32: what the temperature divides, before the sigmoid."""
        texts = [statements] if isinstance(statements, str) else list(statements)
        parts = [self._logits(texts[at : at + batch]) for at in range(0, len(texts), batch)]
        return torch.cat(parts).cpu()

    def _logits(self, texts: list[str]) -> Tensor:
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        rows = [[*row[: self.max_tokens - 1], self.tokenizer.eos_token_id] for row in ids]
        width = max(map(len, rows))
        device = self.encoder.device
        padded = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = (torch.arange(width, device=device) < lengths[:, None]).long()
        states = self.encoder(input_ids=padded, attention_mask=mask).last_hidden_state
        last = states[torch.arange(len(rows), device=device), lengths - 1]
        return F.linear(last.float(), self.head["weight"], self.head["bias"]).squeeze(-1)
