"""What a program does with jobs, checkpoints and batches through OpenAI's client, of any version:

    python openai_jobs.py URL TUNED_MODEL JOB ROWS PREFERENCES LINES

It stands alone, for each version runs it in an environment of its own, and prints the names of what
it did. Answers that are not of the client's own types are errors.
"""

import json
import sys
import time

import openai

URL, MODEL, JOB, ROWS, PREFERENCES, LINES = sys.argv[1:]
client = openai.OpenAI(
    base_url=f"{URL}/v1", api_key="none", max_retries=0, _strict_response_validation=True
)
jobs = client.fine_tuning.jobs
is_old = int(openai.__version__.split(".")[0]) < 2


def upload(path, purpose):
    with open(path, "rb") as file:
        return client.files.create(file=file, purpose=purpose).id


def until(look, ends):
    for _ in range(600):
        one = look()
        if one.status in ends:
            return one
        time.sleep(0.2)
    raise AssertionError(f"still {one.status}")


def supervised():
    job = jobs.create(model="tiny-chat", training_file=upload(ROWS, "fine-tune"), suffix="v")
    end = until(lambda: jobs.retrieve(job.id), ("succeeded", "failed"))
    assert end.fine_tuned_model, end.error
    assert [one.message for one in jobs.list_events(job.id)]
    assert end.id in [one.id for one in jobs.list(limit=2)]


def dpo():
    method = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": 1}}}
    file = upload(PREFERENCES, "fine-tune")
    options = {"extra_body": {"method": method}} if is_old else {"method": method}
    job = jobs.create(model=MODEL, training_file=file, **options)
    end = until(lambda: jobs.retrieve(job.id), ("succeeded", "failed"))
    assert end.fine_tuned_model, end.error
    told = end.method if is_old else end.method.model_dump()
    assert (told["type"], told["dpo"]["hyperparameters"]["beta"]) == ("dpo", 0.2)


def checkpoints():
    (point,) = jobs.checkpoints.list(JOB)
    name = point.fine_tuned_model_checkpoint
    assert client.models.retrieve(name).id == name
    answer = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "you"}]
    )
    assert answer.choices[0].message.content == "you said you"


def batches():
    batch = client.batches.create(
        input_file_id=upload(LINES, "batch"),
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"who": "me"},
    )
    end = until(lambda: client.batches.retrieve(batch.id), ("completed", "failed", "expired"))
    assert (end.status, end.request_counts.completed) == ("completed", 3), end.errors
    lines = client.files.content(end.output_file_id).text.splitlines()
    assert sorted(json.loads(one)["custom_id"] for one in lines) == ["row-0", "row-1", "row-2"]
    assert batch.id in [one.id for one in client.batches.list(limit=1)]


def refusal(ask):
    try:
        ask()
    except openai.APIStatusError as error:
        return error.status_code, error.code, error.param
    return None


def refusals():
    file = refusal(lambda: jobs.create(model="tiny-chat", training_file="file-none"))
    assert file == (400, "file_not_found", "training_file")
    assert refusal(lambda: client.batches.cancel("batch_none")) == (404, None, "id")


for step in (supervised, dpo, checkpoints, batches, refusals):
    step()
    print(step.__name__, flush=True)
