"""Faults in single tasks, in packing, and in retrieval."""

from tests.mutants.fault import Fault

HALVES = "tests/unit/test_halves.py"
RETRIEVER = "tests/unit/test_retriever_task.py"
TERMS = "tests/numerics/test_vera_terms.py"
VERA = "tests/numerics/test_vera_training.py"
VERA_METRICS = "tests/unit/test_vera_metrics.py"
CALIBRATION = "tests/unit/test_vera_calibration.py"
FID = "tests/numerics/test_fid_model.py"
FIDO = "tests/numerics/test_fido.py -k 'twin or plain'"
CROSS_MODEL = "tests/numerics/test_cross_attention_model.py"
ROTARY = "tests/numerics/test_cross_attention_rotary.py"
PACKED = "tests/numerics/test_packed_decoder.py"
ABSORBED = "tests/numerics/test_absorbed.py"
FAMILIES = "tests/numerics/test_families.py"
ADAPTERS = "tests/numerics/test_adapters.py"
QUANTIZED = "tests/numerics/test_quantized.py"
EDGES = "tests/numerics/test_adapters_edges.py"
PACKAGES = "tests/unit/test_packages.py"
SENTENCES = "tests/unit/test_sentence_folder.py"
MEMORY = "tests/unit/test_memory_parts.py"
SUMMARISER = "tests/unit/test_summariser_task.py"
RANKING = "tests/unit/test_ranking.py"
MINING = "tests/unit/test_mining.py"

FAULTS = [
    # Retriever
    Fault(
        "trainer/tasks/retriever/losses.py",
        'target_Q = pool["counts"].cumsum(0) - pool["counts"]',
        'target_Q = pool["counts"].cumsum(0) - 1',
        why="a query is taught to find its last negative",
        tests=RETRIEVER,
    ),
    Fault(
        "trainer/tasks/retriever/losses.py",
        "    found_QP[torch.arange(len(target_Q), device=target_Q.device), target_Q] = False",
        "    pass",
        why="with masked duplicates the passage that is looked for is masked, too",
        tests=RETRIEVER,
    ),
    Fault(
        "trainer/tasks/retriever/losses.py",
        "is_scored & (scored_Q > 1)[query]",
        "is_scored & (scored_Q > 2)[query]",
        why="distillation ignores queries with two scored passages",
        tests=RETRIEVER,
    ),
    Fault(
        "trainer/tasks/retriever/metrics.py",
        "best_Q <= MRR_DEPTH",
        "best_Q < MRR_DEPTH",
        why="MRR@10 in training drops rank 10 and disagrees with every published number",
        tests=RETRIEVER,
    ),
    Fault(
        "trainer/tasks/retriever/metrics.py",
        "(ranks <= depth)",
        "(ranks < depth)",
        why="recall@k looks at k - 1 passages",
        tests=RETRIEVER,
    ),
    Fault(
        "trainer/tasks/retriever/metrics.py",
        "torch.searchsorted(others, score)",
        "torch.searchsorted(others, score, right=True)",
        why="a retriever whose vectors are all alike finds everything",
        tests=RETRIEVER,
    ),
    Fault(
        "trainer/tasks/retriever/selection.py",
        "start = turn.epoch * wanted % count",
        "start = 0",
        why="every epoch trains on the same negatives",
        tests=RETRIEVER,
    ),
    # Vera
    Fault(
        "trainer/tasks/vera/losses.py",
        "return ~is_self_AK, is_same_AK & ~is_self_AK",
        "return ~is_self_AK, is_same_AK",
        why="a statement is a positive of itself",
        tests=TERMS,
    ),
    Fault(
        "trainer/tasks/vera/losses.py",
        "_summed(terms_S, is_other_GS) / is_other_GS.sum(-1).clamp(min=1)",
        "_summed(terms_S, is_other_GS)",
        why="groups of many distractors outweigh the others",
        tests=TERMS,
    ),
    Fault(
        "trainer/tasks/vera/task.py",
        "num_cross_entropies, num_groups = distributed.total(torch.stack(own))",
        "num_cross_entropies, num_groups = torch.stack(own)",
        why="each rank divides by its own groups",
        tests=f"{VERA} -k 'one_rank_two_ranks'",
    ),
    Fault(
        "trainer/tasks/vera/task.py",
        "[: most - gold]) + gold",
        "[: most - gold])",
        why="the true statement is drawn among the false ones",
        tests=f"{VERA} -k 'distractors or drawn or sampl'",
    ),
    Fault(
        "trainer/tasks/vera/metrics.py",
        "weights = 1.0 / np.bincount(numbers)[numbers] if len(rows)",
        "weights = np.ones(len(rows)) if len(rows)",
        why="a large task decides every metric",
        tests=VERA_METRICS,
    ),
    Fault(
        "trainer/tasks/vera/calibration.py",
        "np.searchsorted(edges[1:-1], scores_N)",
        'np.searchsorted(edges[1:-1], scores_N, side="right")',
        why="statements on the edge of a bin fall into the other one: ECE is not the published one",
        tests=CALIBRATION,
    ),
    # FiD and the stream of tokens
    Fault(
        "trainer/models/head.py",
        "self._scale_of_states = config.d_model**-0.5 if scales_states(config) else 1.0",
        "self._scale_of_states = 1.0",
        why="the logits of a T5 v1.0 are too large",
        tests=FID,
    ),
    Fault(
        "trainer/tasks/fid/model.py",
        "(tokens_P * len(pairs) * config.num_heads)",
        "(tokens_P * len(pairs))",
        why="a retriever is taught with scores of another scale than published",
        tests=FID,
    ),
    Fault(
        "trainer/tasks/fid/fido.py",
        "        if number % every:",
        "        if (number - 1) % every:",
        why="a FiDO reader keeps the first cross-attention of every k blocks, not the last",
        tests=FIDO,
    ),
    Fault(
        "trainer/tasks/fid/fido.py",
        "own.weight.copy_(of_heads.mean(0))",
        "own.weight.copy_(of_heads[0])",
        why="the shared head starts as the first one, and what the others know is lost",
        tests=FIDO,
    ),
    Fault(
        "trainer/tasks/fid/fido.py",
        "if has != wants:",
        "if False:",
        why="a reader that was never trained with the switches is evaluated as if it were",
        tests=FIDO,
    ),
    Fault(
        "trainer/tasks/fid/tokens.py",
        "targets[int(row[DRAW][0]) % len(targets) if DRAW in row else 0]",
        "targets[0]",
        why="of several answers only the first is ever trained on",
        tests="tests/unit/test_fid_tokens.py",
    ),
    Fault(
        "trainer/models/packed/layout.py",
        "used + np.arange(len(members)) * width",
        "np.arange(len(members)) * width",
        why="rows of different lengths lie on top of each other",
        tests="tests/unit/test_fid_packing.py",
    ),
    # A base in 8 or 4 bits
    Fault(
        "trainer/models/frozen/quantized.py",
        "if self.scales.dtype != scales.dtype:",
        "if False:",
        why="scales are rounded to bf16 with the model",
        tests=QUANTIZED,
    ),
    Fault(
        "trainer/models/frozen/quantized.py",
        'if is_plain and not whole.intersection(name.split(".")):',
        "if is_plain:",
        why="what a T5 keeps in fp32 is packed",
        tests=QUANTIZED,
    ),
    Fault(
        "trainer/tasks/token_task.py",
        'train = self.cfg.train.model_copy(update={"base_bits": None})',
        "train = self.cfg.train",
        why="a merged export has no weights of the layers that are packed",
        tests=QUANTIZED,
    ),
    # The output layer in chunks, and attention on streams
    Fault(
        "trainer/models/losses.py",
        "(gradient_CV,) = torch.autograd.grad(loss, leaf_CV, factor)",
        "(gradient_CV,) = torch.autograd.grad(loss, leaf_CV)",
        why="in fp16 the gradient of a head in chunks is not scaled",
        tests="tests/numerics/test_chunked_loss.py",
    ),
    Fault(
        "trainer/models/losses.py",
        "                each.mul_(gradient)",
        "                each.mul_(1.0)",
        why="a head in chunks does not know what its loss is divided by",
        tests="tests/numerics/test_chunked_loss.py",
    ),
    Fault(
        "trainer/models/packed/stream_attention.py",
        "width = num_keys + num_queries - 1",
        "width = num_keys + num_queries",
        why="the table of biases learns from the wrong distances",
        tests="tests/numerics/test_stream_attention.py",
    ),
    # Cross-attention
    Fault(
        "trainer/tasks/cross_attention/decoder/attention.py",
        "else ~has_key_B1 & real_BL",
        "else ~has_key_B1.expand_as(real_BL)",
        why="a row whose keys are all hidden attends to filling",
        tests=PACKED,
    ),
    Fault(
        "trainer/tasks/cross_attention/decoder/model.py",
        "device=x.device) >= rate",
        "device=x.device) < rate",
        why="key dropout hides what it should keep",
        tests=PACKED,
    ),
    Fault(
        "trainer/tasks/cross_attention/decoder/layer.py",
        "(x_BTD + out_BTD if self.skip else out_BTD)",
        "out_BTD",
        why="layers.skip does nothing",
        tests=CROSS_MODEL,
    ),
    Fault(
        "trainer/models/packed/stock.py",
        "(distance_LL < (window or length))",
        "(distance_LL <= (window or length))",
        why="a sliding window sees one token too many",
        tests=PACKED,
    ),
    Fault(
        "trainer/tasks/cross_attention/decoder/rotary.py",
        "torch.cat((-second, first), dim=-1)",
        "torch.cat((second, -first), dim=-1)",
        why="positions are turned the wrong way round",
        tests=ROTARY,
    ),
    Fault(
        "trainer/tasks/cross_attention/text/fim.py",
        "suffix[: len(suffix) - max(surplus, 0)]",
        "suffix[: len(suffix) - max(surplus - 1, 0)]",
        why="a text that is filled in the middle is longer than the model's positions",
        tests="tests/unit/test_cross_attention_rows.py",
    ),
    # Bases of today
    Fault(
        "trainer/models/decoder/backbone.py",
        "tuple(window if kind == _kind(window) else None for kind in kinds)",
        "tuple(window for kind in kinds)",
        why="every block of a Gemma sees its window only",
        tests=FAMILIES,
    ),
    Fault(
        "trainer/models/decoder/backbone.py",
        'of_kind = f"{_kind(window)}_" if _is_by_kind(self.config) else ""',
        'of_kind = f"{_kind(None)}_" if _is_by_kind(self.config) else ""',
        why="the blocks of a Gemma 3 that have a window turn as slowly as the others",
        tests=FAMILIES,
    ),
    Fault(
        "trainer/models/packed/stock.py",
        "* (scale / softcap)) * softcap",
        "* scale)",
        why="packed scores of a Gemma 2 are capped at 1",
        tests=FAMILIES,
    ),
    Fault(
        "trainer/models/packed/t5_encoder.py",
        "is_shared = not encoder.block[-1].layer[0].SelfAttention.has_relative_attention_bias",
        "is_shared = True",
        why="all blocks of a umT5 take the position biases of the first one",
        tests=FAMILIES,
    ),
    Fault(
        "trainer/data/byte_tokenizer.py",
        "byte + slow.offset",
        "byte",
        why="every text means another one to a ByT5",
        tests="tests/unit/test_vocabulary.py -k byt5",
    ),
    Fault(
        "trainer/tasks/summariser/task.py",
        "weights = {**frozen, **weights}",
        "weights = {**weights}",
        why="an exported T5Gemma 2 has random weights for pictures",
        tests=SUMMARISER,
    ),
    Fault(
        "trainer/models/packed/stock.py",
        "mask = rows.mask(number, sliding_window, is_causal=is_causal)",
        "mask = rows.mask(number, None, is_causal=is_causal)",
        why="a Mistral on a stream sees beyond its window",
        tests=f"{FAMILIES} -k 'packed_rows and mistral'",
    ),
    Fault(
        "trainer/models/packed/stock.py",
        "first = config.pad_token_id + 1 if config.model_type in _AFTER_PAD else 0",
        "first = 0",
        why="a RoBERTa on a stream counts positions from those of its pads",
        tests=f"{FAMILIES} -k 'packed_rows and roberta'",
    ),
    Fault(
        "trainer/models/packed/t5_decoder.py",
        "own = replace(rows, keys=rows.queries, is_causal=True)",
        "own = replace(rows, keys=rows.queries)",
        why="a summary sees its own next token",
        tests=f"{FAMILIES} -k 'packed_rows and summariser'",
    ),
    Fault(
        "trainer/models/fused.py",
        "(gradient * scale).masked_fill_(result <= 0, 0.0)",
        "(gradient * scale).masked_fill_(result < 0, 0.0)",
        why="what ReLU and dropout took learns all the same",
        tests="tests/numerics/test_fused.py -k relu",
    ),
    Fault(
        "trainer/models/packed/absorbed.py",
        "            shares = _drop(shares, drop, is_dropped).to(dtype)",
        "            shares = shares.to(dtype)",
        why="passages learn from what dropout took",
        tests=f"{ABSORBED} -k equals",
    ),
    Fault(
        "trainer/models/packed/absorbed.py",
        "places = places.new_zeros(queries).index_copy(0, rows.cells_N, places)",
        "places = torch.arange(queries, device=shares.device)",
        why="a short answer drops other shares beside others than alone",
        tests=f"{ABSORBED} -k equals",
    ),
    Fault(
        "trainer/models/packed/absorbed.py",
        "scores.masked_fill_(~rows.is_state_BS[:, None], -torch.inf)",
        "pass",
        why="short answers read the pads behind their passages",
        tests=f"{ABSORBED} -k equals",
    ),
    Fault(
        "trainer/models/packed/absorbed.py",
        "ctx.save_for_backward(x_NHX, weight_ID)",
        "ctx.save_for_backward(x_NHX, weight_ID.clone())",
        why="under ZeRO-3 every rank keeps whole weights until the backward pass",
        tests=f"{ABSORBED} -k kept",
    ),
    Fault(
        "trainer/models/packed/attention.py",
        "bidirectional=not table.is_decoder,",
        "bidirectional=True,",
        why="a T5's decoder takes the position biases of an encoder",
        tests=f"{FAMILIES} -k 'packed_rows and summariser'",
    ),
    Fault(
        "trainer/tasks/retriever/model.py",
        'starts[:-1] if pooling == "cls" else starts[1:] - 1',
        "starts[:-1]",
        why="a decoder's vector is its first state",
        tests=f"{FAMILIES} -k 'packed_rows and retriever-llama'",
    ),
    Fault(
        "trainer/models/packed/layout.py",
        'is_ignored = torch.from_numpy(~flags) | (packed["position"] == 0)',
        "is_ignored = torch.from_numpy(~flags)",
        why="the first token of a row is predicted from the row before it",
        tests=f"{FAMILIES} -k 'packed_rows and causal_lm-llama'",
    ),
    Fault(
        "trainer/models/head.py",
        "return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap",
        "return logits",
        why="the logits of a Gemma 2 are not capped",
        tests=FAMILIES,
    ),
    Fault(
        "trainer/models/head.py",
        'scale /= getattr(config, "logits_scaling", None) or 1.0',
        'scale *= getattr(config, "logits_scaling", None) or 1.0',
        why="the logits of a Granite are multiplied instead of divided",
        tests=FAMILIES,
    ),
    Fault(
        "trainer/models/weight_files.py",
        "if got != digest.lower():",
        "if len(got) != len(digest):",
        why="weights with another digest are trained",
        tests=PACKAGES,
    ),
    Fault(
        "trainer/files/packages.py",
        "if folder.is_dir() and folder.is_relative_to(root.resolve()):",
        "if folder.is_dir():",
        why="a name leads out of the package",
        tests=PACKAGES,
    ),
    Fault(
        "trainer/tasks/retriever/sentence_folder.py",
        '"prompts": {"query": data.query_prefix, "document": data.passage_prefix},',
        '"prompts": {"query": "", "document": ""},',
        why="sentence-transformers encodes an export without its prefixes",
        tests=SENTENCES,
    ),
    # Summariser
    Fault(
        "trainer/tasks/summariser/model.py",
        "smoothing = self.label_smoothing if self.training else 0.0",
        "smoothing = self.label_smoothing",
        why="the validation loss is smoothed, so that runs cannot be compared",
        tests=SUMMARISER,
    ),
    Fault(
        "trainer/tasks/summariser/task.py",
        "[*ids[: limit - 1], self.end]",
        "ids[:limit]",
        why="a summary that was cut teaches the model never to end",
        tests=SUMMARISER,
    ),
    Fault(
        "trainer/tasks/summariser/rouge.py",
        'key=lambda of_reference: of_reference["rouge1"]',
        'key=lambda of_reference: of_reference["rougel"]',
        why="ROUGE is taken from another reference than SciTLDR's script takes",
        tests="tests/unit/test_summariser_rouge.py",
    ),
    # A language model
    Fault(
        "trainer/tasks/causal_lm/task.py",
        'torch.tensor(len(batch["scored"])',
        'torch.tensor(len(batch["labels"])',
        why="the loss is divided by tokens that are not scored",
        tests="tests/contract/test_task_contract.py -k 'golden and causal_lm'",
    ),
    # Retrieval
    Fault(
        "trainer/retrieval/runs.py",
        "math.log2(rank + 1)",
        "math.log2(rank + 2)",
        why="nDCG is not trec_eval's",
        tests=RANKING,
    ),
    Fault(
        "trainer/retrieval/runs.py",
        "key=lambda hit: (np.float32(hit.score), hit.passage), reverse=True",
        "key=lambda hit: (-np.float32(hit.score), hit.passage)",
        why="equal scores are not ordered as trec_eval orders them",
        tests=RANKING,
    ),
    Fault(
        "trainer/retrieval/runs.py",
        "start=1)) / num_relevant",
        "start=1)) / max(1, len(ranks))",
        why="MAP ignores the relevant passages that were not found",
        tests=RANKING,
    ),
    Fault(
        "trainer/retrieval/exact_search.py",
        "ordered * 2**32 + (_LOW - positions)",
        "ordered * 2**32 + positions",
        why="of equal scores the last passage wins, and positions come back wrong",
        tests="tests/unit/test_search.py",
    ),
    Fault(
        "trainer/retrieval/negatives.py",
        "hits[window.first - 1 : window.last]",
        "hits[window.first : window.last]",
        why="the hardest negative is never trained on",
        tests=MINING,
    ),
    Fault(
        "trainer/retrieval/negatives.py",
        "    if not window.may_have_answer and query.answers:",
        "    if False:",
        why="passages with the answer are taught to be negatives",
        tests=MINING,
    ),
    Fault(
        "trainer/retrieval/answer_recall.py",
        "first <= k",
        "first < k",
        why="answer recall at k looks at k - 1 passages",
        tests="tests/unit/test_answer_recall.py",
    ),
    Fault(
        "trainer/tasks/causal_lm/task.py",
        'flags = [row["scored"] if has_labels',
        'flags = [row["scored"] if self.chat',
        "prompts are labels where answers alone ought to be",
        tests="tests/unit/test_causal_lm_task.py",
    ),
    Fault(
        "trainer/data/lookup.py",
        "told.remove(answer)",
        "told.remove(told[0])",
        why="the control still holds what answers, and a reader that guesses is not found out",
        tests="tests/unit/test_lookup.py",
    ),
    Fault(
        "trainer/data/lookup.py",
        "trained if self._is_training else fresh",
        "trained",
        why="names of the validation stand in training: what was remembered looks read",
        tests="tests/unit/test_lookup.py",
    ),
    # Adapters
    Fault(
        "trainer/models/adapters.py",
        "layer._disable_adapters = True",
        "layer._disable_adapters = False",
        why="prepared states of contexts differ from those that the model makes itself",
        tests=f"{EDGES} -k contexts",
    ),
    Fault(
        "trainer/models/adapters.py",
        '"use_rslora": how.rslora,',
        '"use_rslora": False,',
        why="peft scales an exported adapter otherwise than it was trained",
        tests=f"{ADAPTERS} -k 'exported and rslora and causal_lm'",
    ),
    Fault(
        "trainer/models/adapters.py",
        "layer.float().merge()",
        "layer.float()",
        why="a merged export is the base that nothing was learnt in",
        tests=f"{ADAPTERS} -k 'merged and fid'",
    ),
    Fault(
        "trainer/tasks/cross_attention/decoder/model.py",
        "layer.train(mode)",
        "layer.eval()",
        why="adapters under added layers are trained without their dropout",
        tests=f"{EDGES} -k 'dropout and cross_attention'",
    ),
    Fault(
        "trainer/tasks/token_task.py",
        "adapters.freeze_rest(model.get_submodule(self.base_name))",
        "pass",
        why="weights of the base train beside its adapters and are missing in the export",
        tests=f"{EDGES} -k compatible",
    ),
    Fault(
        "trainer/memory/measure.py",
        "return self.partitioned if stage == 3 and self.partitioned else self.moments",
        "return self.moments",
        why="a run at ZeRO-3 with a frozen base is planned without what its linear layers keep",
        tests="tests/numerics/test_memory_plan_adapters.py -k lora-3",
    ),
    Fault(
        "trainer/memory/deepspeed_terms.py",
        "(is_first and not step.waits)",
        "is_first",
        why="a step of GradCache is planned without the gradients beside its longest micro-batch",
        tests=f"{MEMORY} -k before_a_steps_first",
    ),
    Fault(
        "trainer/memory/deepspeed_terms.py",
        "if step.largest <= zero.reduce_bucket:",
        "if True:",
        why="gradients that wait for a bucket they do not fit into are planned away",
        tests=f"{MEMORY} -k wait_beside_a_bucket",
    ),
    Fault(
        "trainer/memory/deepspeed_terms.py",
        "held = replace(held, weights=held.weights - freed)",
        "pass",
        why="ZeRO-3 is planned with all weights whole when it reduces, and refused where it fits",
        tests=f"{MEMORY} -k parts_again",
    ),
    Fault(
        "trainer/memory/deepspeed_terms.py",
        "large = sum(size * count for size, count in step.sizes if size > zero.persisted)",
        "large = 0",
        why="ZeRO-3 is planned without the exchange that its weights are copied out of",
        tests=f"{MEMORY} -k twice_what_it_gathered",
    ),
    Fault(
        "trainer/memory/planned_rows.py",
        "weight, kind = float((lengths**power).sum()), (place == 0, power)",
        "weight, kind = float((lengths**power).sum()), (True, power)",
        why="no micro-batch is planned behind the gradients of another",
        tests=f"{MEMORY} -k 'heaviest_micro_batch or one_length'",
    ),
    Fault(
        "trainer/models/decoder/halves.py",
        "torch.full_like(found[name], -1.0)",
        "torch.full_like(found[name], 0.0)",
        why="an encoder made of a language model does not end as the identity",
        tests=HALVES,
    ),
    Fault(
        "trainer/models/decoder/halves.py",
        'if ".encoder." in name:',
        "if False:",
        why="a decoder does not find in a document what it looked up in a text",
        tests=HALVES,
    ),
    Fault(
        "trainer/config/groups.py",
        'values = {**values, "base": {**base, "experiment": first}}',
        'values = {**values, "base": {"experiment": first}}',
        why="--steps takes the decoder-only model for the encoder-decoder made of it",
        tests=HALVES,
    ),
]
