"""Faults in votes on answers, and in a language model as judge."""

from tests.mutants.fault import Fault

VOTES, HTTP, MODEL = (
    "tests/unit/test_votes.py",
    "tests/serve/test_votes_over_http.py",
    "tests/unit/test_llm_judge.py",
)

FAULTS = [
    Fault(
        "trainer/judging/votes.py",
        'replace_file(path, b"".join([*others, *new]))',
        'path.write_bytes(b"".join([*others, *new]))',
        why="a server that is killed while somebody votes tears the file of votes",
        tests=VOTES,
    ),
    Fault(
        "trainer/judging/votes.py",
        "return other is not None and (other.pair, other.voter) == (vote.pair, vote.voter)",
        "return other is not None and other.pair == vote.pair",
        why="a vote takes away those of other people",
        tests=VOTES,
    ),
    Fault(
        "trainer/judging/votes.py",
        'with refusals(folder), FileLock(folder / ".votes.lock", timeout=_LOCK_S):',
        "with refusals(folder):",
        why="of two votes at once one is lost",
        tests=VOTES,
    ),
    Fault(
        "trainer/judging/votes.py",
        "if vote is None or vote.pair not in wanted:",
        "if vote is None:",
        why="votes on answers that the model does not give any more count for it",
        tests=VOTES,
    ),
    Fault(
        "trainer/judging/votes.py",
        'is_preference = vote.better != "equal" and not any(map(is_blank, (pair.before, pair.after)))',
        'is_preference = vote.better != "equal"',
        why="a blank answer makes the file of votes one that no training reads",
        tests=VOTES,
    ),
    Fault(
        "trainer/judging/votes.py",
        'return "after" if digest[0] % 2 else "before"',
        'return "after"',
        why="the trained model's answer always stands on the left",
        tests=VOTES,
    ),
    Fault(
        "trainer/metrics/win_rate.py",
        "rate = sum(map(_mean, choices.values())) / len(choices)",
        "rate = sum(_POINTS[one] for of_pair in choices.values() for one in of_pair) / sum(\n"
        "        map(len, choices.values())\n    )",
        why="a pair that many people looked at counts many times",
        tests=VOTES,
    ),
    Fault(
        "trainer/metrics/win_rate.py",
        "half = z / scale * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))",
        "half = z * math.sqrt(share * (1 - share) / num)",
        why="the interval of few votes is too narrow",
        tests=VOTES,
    ),
    Fault(
        "trainer/verdict/opinions.py",
        'choices[pair] = "equal" if is_reversal else one.trained_first',
        "choices[pair] = one.trained_first",
        why="a judge that likes the first answer prefers the trained model",
        tests=f"{VOTES} {MODEL}",
    ),
    Fault(
        "jobs/serve/live/votes.py",
        '    if client.role != "read":\n',
        "    if True:\n",
        why="a token that may not vote is asked to",
        tests=HTTP,
    ),
    Fault(
        "jobs/serve/live/votes.py",
        "    client, folder = writer_of(request), find_run(request).path\n",
        "    client, folder = client_of(request), find_run(request).path\n",
        why="a token that may only read votes",
        tests=HTTP,
    ),
    Fault(
        "jobs/serve/live/votes.py",
        'sides["right"] = "before" if left == "after" else "after"',
        'sides["right"] = left',
        why="whoever prefers the right answer votes for the left one",
        tests=HTTP,
    ),
    Fault(
        "trainer/judging/llm_judge.py",
        "opener = urllib.request.build_opener(_NoRedirect)",
        "opener = urllib.request.build_opener()",
        why="a redirect takes the key to another address",
        tests=MODEL,
    ),
    Fault(
        "trainer/judging/llm_judge.py",
        'return text.replace(self.key, "***") if self.key else text',
        "return text",
        why="an endpoint that repeats the key has it printed",
        tests=MODEL,
    ),
    Fault(
        "trainer/judging/llm_judge.py",
        '            line = b"\\n" + line  # the last writer was killed in the middle of its line\n',
        "            pass\n",
        why="an answer behind a torn line is lost and asked for again",
        tests=MODEL,
    ),
]
