"""Instructor: answers as objects, in each of its ways, and its command line for jobs."""

import subprocess
import sys
from typing import Literal

import instructor
from calls import CHAT, MODEL, QUESTION, ROWS, URL, tried, until
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=URL, api_key="none", max_retries=0)
HOW = {"model": CHAT, "messages": QUESTION, "temperature": 0, "max_tokens": 64, "max_retries": 0}


class Colour(BaseModel):
    colour: Literal["red", "blue"]
    sure: bool


def schema():
    ask = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).create
    assert isinstance(ask(response_model=Colour, **HOW), Colour)


def tools():
    ask = instructor.from_openai(client, mode=instructor.Mode.TOOLS).create
    assert isinstance(ask(response_model=Colour, **HOW), Colour)


def files():
    words = [sys.executable, "-m", "instructor.cli.cli", "files", "upload", ROWS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def tune():
    before = {one.id for one in client.fine_tuning.jobs.list()}
    words = ["-m", "instructor.cli.cli", "jobs", "create-from-file", ROWS, "--model", MODEL]
    # the command watches its job for ever
    running = subprocess.Popen([sys.executable, *words, "--n-epochs", "1"], stdout=-3, stderr=-3)
    try:

        def new():
            return [one for one in client.fine_tuning.jobs.list() if one.id not in before]

        (job, *_) = until(new, lambda jobs: jobs and jobs[0].status in ("succeeded", "failed"))
        assert job.status == "succeeded", job.error
        assert running.poll() is None
    finally:
        running.kill()


tried("chat: JSON by a schema", schema)
tried("chat: a tool called, its result sent back", tools)
tried("files", files)
tried("fine-tuning, to an answer of the model", tune)
