"""Faults in what all tasks share: the loop, the engine, checkpoints, random state, data order,
files, memory.
"""

from tests.mutants.fault import Fault

STEPS = "tests/contract/test_task_contract.py -k '(golden or stages_ranks) and causal_lm'"
RESUME = "tests/contract/test_task_contract.py -k 'resumes_bit_for_bit and causal_lm'"
ENGINE = "tests/numerics/test_engine.py"
GRADCACHE = "tests/numerics/test_gradcache.py"
FOLDERS = "tests/numerics/test_partitioned_base.py"
ATOMIC = "tests/unit/test_atomic_files.py"
CHECKPOINT = "tests/unit/test_checkpoint.py"
RANKS = "tests/unit/test_checkpoint_ranks.py"
RNG = "tests/unit/test_rng.py"
SCHEDULE = "tests/unit/test_schedule.py"
WINDOWS = "tests/unit/test_windows.py"
STORE = "tests/unit/test_store.py"
TELEMETRY = "tests/unit/test_telemetry.py -k 'not wandb'"
BAD_INPUT = "tests/runs/test_bad_input.py"
GROUPS = "tests/runs/test_groups.py"
MEMORY = "tests/unit/test_memory_parts.py"
BLOCKS = "tests/unit/test_equal_blocks.py"
TIMING = "tests/unit/test_timing.py"
RECOMPUTED = "tests/numerics/test_recomputation.py"
REAL_MEMORY = "tests/numerics/test_memory_plan.py -k 'terms_of_deepspeed and (0 or 2)'"

FAULTS = [
    # Blocks computed again
    Fault(
        "trainer/models/recomputation.py",
        "if every and number % every == 0:",
        "if every and number % every == 1:",
        why="no block is computed again where every one is to be",
        tests=f"{RECOMPUTED} -k 'last_bit and causal_lm'",
    ),
    Fault(
        "trainer/memory/fake_step.py",
        "if every > 1:",
        "if every > 9:",
        why="blocks that differ in turn are counted by four of them",
        tests=f"{RECOMPUTED} -k 'few_blocks and causal_lm'",
    ),
    Fault(
        "trainer/memory/advice.py",
        "if self.has(False):",
        "if self.has(True):",
        why="auto computes nothing again where that does not fit",
        tests=f"{RECOMPUTED} -k auto_is",
    ),
    # Rows where they lie
    Fault(
        "trainer/models/packed/stock.py",
        "reach = -1 if window is None else window - 1",
        "reach = -1 if window is None else window",
        why="a query sees one key more than its window has",
        tests="tests/numerics/test_rows_where_they_lie.py -k mistral",
    ),
    Fault(
        "trainer/models/packed/stock.py",
        "window_size=(reach, 0 if is_causal else reach),",
        "window_size=(reach, reach),",
        why="a language model sees the tokens that it is to write",
        tests="tests/numerics/test_rows_where_they_lie.py -k gpt_bigcode",
    ),
    # The engine and its optimizer
    Fault(
        "trainer/training/engine.py",
        "self.model.backward(loss * self._world",
        "self.model.backward(loss",
        why="DeepSpeed averages over ranks: with eight ranks the gradient is an eighth",
        tests=ENGINE,
    ),
    Fault(
        "trainer/training/engine.py",
        "if self.stage == 0 and self._world > 1:",
        "if False:",
        why="without ZeRO every rank trains a model of its own",
        tests=ENGINE,
    ),
    Fault(
        "trainer/training/engine.py",
        '"weight_decay": 0.0}',
        '"weight_decay": optim.weight_decay}',
        why="biases and norms decay, too",
        tests=ENGINE,
    ),
    Fault(
        "trainer/training/engine.py",
        "return nn.utils.clip_grad_norm_(parameters, self.clip)",
        "return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])",
        why="gradients are measured and not clipped",
        tests=ENGINE,
    ),
    Fault(
        "trainer/training/optimizer_state.py",
        'count = int(scalars["optimizer_step"])',
        "count = 0",
        why="a resumed run corrects the bias of its moments as if it had just begun",
        tests=ENGINE,
    ),
    Fault(
        "trainer/training/optimizers.py",
        "beta2_decay=BETA2_DECAY",
        "beta2_decay=-0.5",
        why="Adafactor forgets squares at another speed than published",
        tests="tests/numerics/test_adafactor.py",
    ),
    # GradCache
    Fault(
        "trainer/models/gradcache.py",
        "with rng.replay(states[index]):",
        "with torch.enable_grad():",
        why="the two passes draw different dropout, so that gradients belong to no loss",
        tests=GRADCACHE,
    ),
    Fault(
        "trainer/models/gradcache.py",
        "summed = distributed.total(torch.cat([before, own, after])).to(gradient.dtype)",
        "summed = torch.cat([before, own, after])",
        why="a passage learns from its own rank's queries only",
        tests=GRADCACHE,
    ),
    Fault(
        "trainer/models/gradcache.py",
        "(distributed.world() if is_whole else 1)",
        "1",
        why="the logged loss is as many times too high as there are ranks",
        tests=GRADCACHE,
    ),
    # Losses and metrics that tasks share
    Fault(
        "trainer/models/losses.py",
        "of_sum if hidden.element_size() == 4 else 2 * of_sum",
        "of_sum",
        why="in 16 bits the head of a usual width takes a quarter longer",
        tests="tests/numerics/test_chunked_loss.py",
    ),
    Fault(
        "trainer/models/losses.py",
        "hidden_BTD.flatten(0, 1).index_select(0, scored_N)",
        "hidden_BTD.flatten(0, 1).index_select(0, scored_N + 1)",
        why="a decoder with layers is asked for the token that it has just read",
        tests="tests/numerics/test_cross_attention_model.py -k next_token_loss",
    ),
    Fault(
        "trainer/tasks/causal_lm/task.py",
        "self._states(**batch).index_select(0, scored)",
        "self._states(**batch).index_select(0, scored + 1)",
        why="a language model is asked for the token that it has just read",
        tests=STEPS,
    ),
    Fault(
        "trainer/models/losses.py",
        'reduction="sum",\n        label_smoothing=smoothing',
        'reduction="mean",\n        label_smoothing=smoothing',
        why="short and long micro-batches weigh the same",
        tests="tests/contract/test_task_contract.py -k 'losses_yields and causal_lm'",
    ),
    Fault(
        "trainer/evaluation/mergeable.py",
        "(Counter(normalised(one).split()) & Counter(normalised(other).split()))",
        "(Counter(set(normalised(one).split())) & Counter(normalised(other).split()))",
        why="a repeated word counts once in F1",
        tests="tests/unit/test_metrics.py",
    ),
    Fault(
        "trainer/evaluation/mergeable.py",
        "float(any(normalised(reference)",
        "float(all(normalised(reference)",
        why="an answer must hold every reference to be right",
        tests="tests/unit/test_metrics.py",
    ),
    Fault(
        "trainer/evaluation/mergeable.py",
        "self.den.double() + other.den.double())",
        "self.den.double())",
        why="a mean over batches is divided by the rows of the first one",
        tests="tests/unit/test_metrics.py",
    ),
    # Ranks
    Fault(
        "trainer/runtime/distributed.py",
        "exact = torch.float64 if tensor.is_floating_point() else torch.int64",
        "exact = torch.float64",
        why="counts of units beyond 2**53 lose their last digits, and types change",
        tests="tests/unit/test_distributed.py -k 'total or identity or types'",
    ),
    # Checkpoints
    Fault(
        "trainer/training/checkpoint.py",
        "            if size != record.size:",
        "            if False:",
        why="a checkpoint whose other machine wrote elsewhere is committed without its shards",
        tests=CHECKPOINT,
    ),
    Fault(
        "trainer/training/checkpoint.py",
        "for _, folder in reversed(candidates(root)):",
        "for _, folder in candidates(root):",
        why="a run resumes from its oldest checkpoint",
        tests=CHECKPOINT,
    ),
    Fault(
        "trainer/training/checkpoint.py",
        "kept = {*recent, *keep, last,",
        "kept = {*recent, last,",
        why="the checkpoint of the best evaluation is pruned",
        tests=CHECKPOINT,
    ),
    Fault(
        "trainer/training/checkpoint.py",
        "    if step != _step_of(folder):",
        "    if False:",
        why="a renamed folder passes for another step",
        tests=CHECKPOINT,
    ),
    Fault(
        "trainer/training/checkpoint.py",
        "tensors_of(shards[rank])",
        "tensors_of(shards[0])",
        why="after a resume all ranks draw the same dropout",
        tests=RANKS,
    ),
    Fault(
        "trainer/training/checkpoint.py",
        "        sync(root)",
        "        pass",
        why="after a power cut the new checkpoint may be gone with the old one",
        tests=CHECKPOINT,
    ),
    Fault(
        "trainer/files/safetensors_file.py",
        "        if got == record.sha256\n",
        "        if got\n",
        why="a flipped bit in the weights is trained on",
        tests=f"{CHECKPOINT} tests/unit/test_shards.py",
    ),
    Fault(
        "trainer/files/safetensors_file.py",
        "        os.fsync(file.fileno())",
        "        pass",
        why="a committed checkpoint may be empty after a power cut",
        tests=CHECKPOINT,
    ),
    Fault(
        "trainer/files/atomic.py",
        "            if is_durable:",
        "            if False:",
        why="status.json, exit.json and scores may be empty after a power cut",
        tests=ATOMIC,
    ),
    Fault(
        "trainer/files/atomic.py",
        "            sync(temporary)\n            os.link(",
        "            os.link(",
        why="after a power cut started.json is empty and the job runs a second time",
        tests=ATOMIC,
    ),
    Fault(
        "trainer/files/atomic.py",
        "os.link(temporary, path)",
        "os.replace(temporary, path)",
        why="of two processes that create a file at once both believe that they were first",
        tests=ATOMIC,
    ),
    Fault(
        "trainer/runtime/rng.py",
        "np.random.SeedSequence((seed, rank))",
        "np.random.SeedSequence((seed + rank,))",
        why="seed 42 on rank 1 draws what seed 43 draws on rank 0",
        tests=RNG,
    ),
    Fault(
        "trainer/runtime/rng.py",
        "        restore(present)",
        "        pass",
        why="GradCache's second pass leaves the generators where the first one began",
        tests=RNG,
    ),
    Fault(
        "trainer/runtime/rng.py",
        "int(cached is not None)",
        "0",
        why="numpy's cached normal number is lost in a resume",
        tests=RNG,
    ),
    # A run, its resume and its exit codes
    Fault(
        "trainer/training/run.py",
        "rng.restore(random(distributed.rank()))",
        "pass",
        why="a resumed run draws other dropout than an undisturbed one",
        tests=RESUME,
    ),
    Fault(
        "trainer/training/run.py",
        "on_main(lambda: checkpoint.tidy(*where, {ready.progress.best_step} - {0}))",
        "pass",
        why="a run killed while it removes an old checkpoint keeps it for ever",
        tests="tests/runs/test_features.py -k killed_between",
    ),
    Fault(
        "trainer/training/run.py",
        '"keep": {progress.best_step} - {0},',
        '"keep": set(),',
        why="the checkpoint of the best evaluation is pruned",
        tests="tests/runs/test_features.py -k 'old_checkpoints_go'",
    ),
    Fault(
        "trainer/training/run_folder.py",
        "    if digest(stored) == digest(plan.values):",
        "    if True:",
        why="a run goes on in the folder of another experiment",
        tests=f"{BAD_INPUT} -k 'resuming_with_something_else'",
    ),
    Fault(
        "trainer/training/run_folder.py",
        "            **{split: store.digest for split, store in stores.items()},\n",
        "",
        why="a run is resumed on other data than it began with",
        tests=f"{BAD_INPUT} -k 'resuming_with_something_else'",
    ),
    Fault(
        "trainer/training/run.py",
        "if not has_kept and int(distributed.total(torch.tensor(int(preemption.requested)))):",
        "if preemption.requested:",
        why="between two experiments one rank stops and the others wait for it",
        tests=GROUPS,
    ),
    Fault(
        "trainer/training/run.py",
        "return EXIT_OK if finished else EXIT_PREEMPTED",
        "return EXIT_OK",
        why="a preempted run counts as done and is never run again",
        tests="tests/runs/test_commands.py -k exits_75",
    ),
    Fault(
        "trainval.py",
        "bool(reset) and not _is_restart()",
        "bool(reset)",
        why="with -r 1 every restart by the scheduler throws away what was trained",
        tests="tests/unit/test_trainval.py",
    ),
    Fault(
        "trainer/commands/options.py",
        "code = error.exit_code\n    except KeyboardInterrupt",
        "code = EXIT_FAILED\n    except KeyboardInterrupt",
        why="bad input looks like a crash and is sent again and again",
        tests=f"{BAD_INPUT} -k 'unknown or missing'",
    ),
    Fault(
        "trainer/commands/options.py",
        'open(path, "x")',
        'open(path, "w")',
        why="the last rank's end hides the error of the first one that failed",
        tests="tests/runs/test_outcome.py",
    ),
    # Memory
    Fault(
        "trainer/memory/launch.py",
        "    rng.restore(state)",
        "    pass",
        why="rehearsing the heaviest batch changes the dropout of the whole run",
        tests="tests/numerics/test_fit.py -k 'rehearsal'",
    ),
    Fault(
        "trainer/memory/launch.py",
        "torch.autograd.grad(loss, weights, allow_unused=True)",
        "loss.backward()",
        why="the gradient of the rehearsal is added to that of the first step",
        tests="tests/numerics/test_memory_plan.py -k 'heaviest_batches_first'",
    ),
    Fault(
        "trainer/memory/deepspeed_terms.py",
        "(master + 4 * step.states) // w",
        "(master + 4 * step.states)",
        why="the plan refuses runs on many GPUs that would fit",
        tests=MEMORY,
    ),
    Fault(
        "trainer/memory/deepspeed_terms.py",
        "master = 4 * P if e < 4 or zero.stage > 0 else 0",
        "master = 4 * P if e < 4 else 0",
        why="the plan forgets the copy of the weights that ZeRO makes in fp32",
        tests=REAL_MEMORY,
    ),
    Fault(
        "trainer/memory/deepspeed_terms.py",
        "Breakdown(activations=most.activations, logits=most.logits, workspace=cublas)",
        "Breakdown(activations=most.activations, workspace=cublas)",
        why="the plan of an evaluation leaves out the logits, its largest tensor",
        tests=MEMORY,
    ),
    # Schedules
    Fault(
        "trainer/training/schedule.py",
        "/ max(1, total - warmup)",
        "/ max(1, total - warmup - 1)",
        why="the rate reaches 0 a step too early",
        tests=SCHEDULE,
    ),
    Fault(
        "trainer/training/schedule.py",
        "math.ceil(schedule.warmup_ratio * total)",
        "math.floor(schedule.warmup_ratio * total)",
        why="warm-up is shorter than in the runs that are to be reproduced",
        tests=SCHEDULE,
    ),
    Fault(
        "trainer/training/schedule.py",
        "if self.bad > schedule.patience:",
        "if self.bad >= schedule.patience:",
        why="the rate falls an evaluation too early",
        tests=SCHEDULE,
    ),
    # Data order
    Fault(
        "trainer/data/order.py",
        "list(dealt[:, sharding.rank])",
        "list(dealt[:, 0])",
        why="all ranks train on the rows of rank 0",
        tests=WINDOWS,
    ),
    Fault(
        "trainer/data/order.py",
        "np.random.SeedSequence([seed, epoch]))",
        "np.random.SeedSequence([seed]))",
        why="every epoch has the same order, and drops the same rows",
        tests=WINDOWS,
    ),
    Fault(
        "trainer/data/order.py",
        "np.random.SeedSequence([self.seed, step, index])",
        "np.random.SeedSequence([self.seed, index])",
        why="a row has the same random choice in every epoch",
        tests=WINDOWS,
    ),
    Fault(
        "trainer/data/order.py",
        "(batches[-1], False)",
        "(batches[-1], True)",
        why="the last rows are counted once for each rank that is short of a batch",
        tests=WINDOWS,
    ),
    Fault(
        "trainer/data/order.py",
        "fits = count <= sharding.micro_batch and tokens <= sharding.micro_tokens",
        "fits = count <= sharding.micro_batch",
        why="micro_tokens bounds nothing: long rows run out of memory",
        tests=WINDOWS,
    ),
    Fault(
        "trainer/data/order.py",
        "if fits and kinds_N[place] == kinds_N[starts[-1]]:",
        "if fits:",
        why="rows that must be apart share a micro-batch",
        tests=WINDOWS,
    ),
    Fault(
        "trainer/data/content.py",
        'hashlib.sha256(f"{encoding_id}\\n".encode())',
        "hashlib.sha256()",
        why="another tokenizer finds the tokens of the old one in the cache",
        tests=STORE,
    ),
    Fault(
        "trainer/data/token_store.py",
        "        if hasher.hexdigest() != digest:",
        "        if False:",
        why="rows that change while they are read are stored under the name of the old ones",
        tests=STORE,
    ),
    # What a run tells
    Fault(
        "trainer/telemetry/metrics_file.py",
        'json.loads(line)["step"] <= step',
        'json.loads(line)["step"] < step',
        why="a resume drops the log line of the step that it goes on from",
        tests=TELEMETRY,
    ),
    Fault(
        "trainer/telemetry/run_record.py",
        'if entry["step"] <= step',
        "if True",
        why="after a resume score_list.json holds evaluations that have not happened yet",
        tests=TELEMETRY,
    ),
    # A base that is a folder of weights
    Fault(
        "trainer/training/engine.py",
        "deepspeed.init_distributed(dist_init_required=False, verbose=False)",
        "pass",
        why="ZeRO-3 from a folder on two ranks takes the world for one rank and does not start",
        tests=FOLDERS,
    ),
    Fault(
        "trainer/training/engine.py",
        "with returned_at_once():",
        "if True:",
        why="a rank takes more than the whole model while it reads its share",
        tests=FOLDERS,
    ),
    Fault(
        "trainer/models/base_model.py",
        "if name not in untied}",
        "}",
        why="the output layer of a T5 v1.1 becomes its embedding under ZeRO-3",
        tests=FOLDERS,
    ),
    Fault(
        "trainer/memory/deepspeed_terms.py",
        "if zero.stage < 3 or is_random:",
        "if is_random:",
        why="eight ranks of a node read eight whole models that no plan has counted",
        tests=MEMORY,
    ),
    Fault(
        "trainer/memory/fake_device.py",
        "is_hidden = scores.eq(-torch.inf)",
        "is_hidden = scores[..., :1].eq(-torch.inf)",
        why="a plan misses the mask of an unfused attention",
        tests="tests/numerics/test_memory_plan.py -k skeleton",
    ),
    Fault(
        "trainer/memory/fake_values.py",
        "fake.twin = None if real.is_meta else real",
        "fake.twin = real",
        why="no plan of memory for layers in a base with rotary positions",
        tests="tests/numerics/test_memory_plan.py -k skeleton",
    ),
    Fault(
        "trainer/memory/fake_device.py",
        "with tracker.standing_for(len(chunks) - 2):",
        "with tracker.standing_for(len(chunks) - 1):",
        why="a plan counts a chunk of every output layer too many",
        tests=BLOCKS,
    ),
    Fault(
        "trainer/timing/blocks.py",
        "Part(works[1], 1 + stacks.missing[stack])",
        "Part(works[1], stacks.missing[stack])",
        why="a plan counts a block of every stack too few",
        tests=BLOCKS,
    ),
    Fault(
        "trainer/timing/blocks.py",
        "if works[1] != works[2]:",
        "if len(works) != stacks.shown:",
        why="a plan takes blocks for equal that do different things",
        tests=BLOCKS,
    ),
    Fault(
        "trainer/memory/measure.py",
        "activations = low.activations + part * (high.activations - low.activations)",
        "activations = low.activations + part * high.activations",
        why="a plan of more rows counts those that it knows twice",
        tests=MEMORY,
    ),
    Fault(
        "trainer/timing/step_time.py",
        "return batches if zero.stage > 1 else 1.0",
        "return 1.0",
        why="stage 2 is predicted to send gradients once a step, not once a micro-batch",
        tests=TIMING,
    ),
    Fault(
        "trainer/timing/fastest.py",
        "(most - none.calls.get(name, 0)) * again / blocks)",
        "(most - none.calls.get(name, 0)))",
        why="to compute one block again is taken for as slow as to compute all",
        tests="tests/unit/test_timing.py -k computed_again",
    ),
    Fault(
        "trainer/timing/late.py",
        "late if together > LATE * whole else None",
        "late if together > whole else None",
        why="a run that is as fast as predicted is told to be late",
        tests=TIMING,
    ),
    Fault(
        "trainer/training/run_folder.py",
        "content_of_rows(lambda: task.rows(split), encoding_id, split)[0] == recorded",
        "content_of_rows(lambda: task.rows(split), encoding_id, split)[0]",
        why="a run goes on with other rows, where an earlier version named them otherwise",
        tests="tests/unit/test_cross_attention_rows.py",
    ),
    Fault(
        "trainer/training/checkpoint.py",
        "            clear(root)",
        "            pass",
        why="what a killed run was removing stays for ever when the next start saves no more",
        tests="tests/runs/test_features.py -k killed_between",
    ),
    Fault(
        "trainer/timing/step_time.py",
        " + kept * gather.latency_s",
        "",
        why="a small weight that every rank keeps at stage 3 is predicted to be there by itself",
        tests=TIMING,
    ),
    Fault(
        "trainer/runtime/deepspeed_optimizers.py",
        "remembered.cache_clear()",
        "pass",
        why="ZeRO-3 with GradCache gathers its weights again in every backward, one by one",
        tests="tests/runs/test_communication.py -k gradcache",
    ),
    Fault(
        "trainer/memory/tracker.py",
        "        self._unread = set(self._large)\n\n    @contextmanager",
        "\n    @contextmanager",
        why="ZeRO-3 with GradCache is planned as if its weights came before any activation",
        tests=BLOCKS,
    ),
]
