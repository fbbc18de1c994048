"""Two loops as the SDK's documentation writes them: supervised learning, and reinforcement learning
with importance sampling on a made-up task, whose reward is the share of sampled tokens below 64.

usage: tinker_loops.py JSON with "url" and "model"
"""

from __future__ import annotations

import json
import os
import sys
import warnings

WORLD = json.loads(sys.argv[1])
os.environ |= {"TINKER_BASE_URL": WORLD["url"], "TINKER_API_KEY": "tml-none"}
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import tinker  # noqa: E402
from tinker import types  # noqa: E402

STEPS, ROUNDS, PROMPTS, SAMPLES, TOKENS = 20, 16, 2, 16, 8


def supervised(client: tinker.ServiceClient) -> list[float]:
    """The losses of a loop that learns a row by heart."""
    training = client.create_lora_training_client(WORLD["model"], rank=8, seed=1).result()
    tokens = [7, 19, 33, 71, 102, 140, 201, 9]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    losses: list[float] = []
    for _ in range(STEPS):
        passed = training.forward_backward([datum], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=3e-3))
        losses.append(passed.result().metrics["loss:sum"] / (len(tokens) - 1))
        step.result()
    return losses


def reward_of(tokens: list[int]) -> float:
    return float(np.mean([token < 64 for token in tokens]))


def reinforced(client: tinker.ServiceClient) -> list[float]:
    """The mean rewards of a loop that samples, scores and learns."""
    training = client.create_lora_training_client(WORLD["model"], rank=8, seed=2).result()
    params = types.SamplingParams(max_tokens=TOKENS, temperature=1.0, stop=[])
    rewards: list[float] = []
    for number in range(ROUNDS):
        sampler = training.save_weights_and_get_sampling_client().result()
        prompts = [[5 + place, 6, 7] for place in range(PROMPTS)]
        asked = [
            sampler.sample(
                types.ModelInput.from_ints(prompt),
                SAMPLES,
                params.model_copy(update={"seed": 100 * number + place}),
            )
            for place, prompt in enumerate(prompts)
        ]
        data: list[types.Datum] = []
        of_round: list[float] = []
        for prompt, future in zip(prompts, asked, strict=True):
            sequences = future.result().sequences
            scores = [reward_of(sequence.tokens) for sequence in sequences]
            of_round += scores
            for sequence, score in zip(sequences, scores, strict=True):
                advantage = score - float(np.mean(scores))
                whole, rest = [*prompt, *sequence.tokens], len(prompt) - 1
                count = len(sequence.tokens)
                inputs = {
                    "target_tokens": whole[1:],
                    "logprobs": [0.0] * rest + list(sequence.logprobs or []),
                    "advantages": [0.0] * rest + [advantage] * count,
                }
                rows = types.ModelInput.from_ints(whole[:-1])
                data.append(types.Datum(model_input=rows, loss_fn_inputs=inputs))
        rewards.append(float(np.mean(of_round)))
        training.forward_backward(data, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return rewards


def main() -> None:
    client = tinker.ServiceClient()
    print(json.dumps({"losses": supervised(client), "rewards": reinforced(client)}), flush=True)
    client.close("success").result()
    os._exit(0)


if __name__ == "__main__":
    main()
