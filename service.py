"""SERVICE: what `lathe-jobs serve` offers, as plain dictionaries. Imports no torch.

models: name -> the experiment that a request fills with its rows, epochs, batch, learning-rate
factor and seed (jobs/serve/offers.py says how), and where it runs (`job`, as in job_configs.py).
The other keys, with their defaults, are those of `ServiceConfig` in the same file.
"""

from __future__ import annotations

from typing import Any

from exp_configs import CAUSAL_LM_TINY, RETRIEVER_TINY, vary
from trainer.config import userfile

Values = dict[str, Any]

# Small enough that each trains on two cores in under two minutes, start-up included.
TINY_CHAT = vary(
    CAUSAL_LM_TINY,
    base={
        "config": {
            **CAUSAL_LM_TINY["base"]["config"],
            "vocab_size": 512,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 2,
            "n_inner": 256,
        }
    },
    tokenizer={"vocab_size": 512},
    train={"global_batch": 8, "micro_batch": 8, "log_every": 1},
    optim={"lr": 3e-3},
    schedule={"warmup_steps": None, "warmup_ratio": 0.1},
    data={"source": "chat", "chat_template": "plain", "max_tokens": 256},
)
TINY_RETRIEVER = vary(
    RETRIEVER_TINY,
    base={
        "config": {
            **RETRIEVER_TINY["base"]["config"],
            "vocab_size": 512,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "intermediate_size": 256,
        }
    },
    tokenizer={"vocab_size": 512},
    train={"global_batch": 8, "micro_batch": 8, "log_every": 1},
    schedule={"warmup_steps": None, "warmup_ratio": 0.1},
    data={"source": "tevatron"},
)

SERVICE: Values = {
    "models": {
        "tiny-chat": {"experiment": TINY_CHAT, "epochs": 3, "driven": {"max_tokens": 512}},
        "tiny-retriever": {"experiment": TINY_RETRIEVER, "epochs": 3},
    },
    # In a container the server listens at 0.0.0.0, and its clients ask for these (compose.yaml).
    "hosts": ["127.0.0.1:8100", "localhost:8100"],
}

if __name__ == "__main__":
    userfile.leave("Start the service: lathe serve -sb results.")
