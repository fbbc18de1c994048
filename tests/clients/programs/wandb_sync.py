"""Weights & Biases' sync of a finished job, without a network (WANDB_MODE=offline)."""

from calls import URL, WORLD, tried
from openai import OpenAI
from wandb.integration.openai.fine_tuning import WandbLogger

# its own check asks wandb's server, which a machine without a network does not reach
WandbLogger._logged_in = True
client = OpenAI(base_url=URL, api_key="none", max_retries=0)


def sync():
    said = WandbLogger.sync(
        fine_tune_job_id=WORLD["job"], openai_client=client, project="lathe", log_datasets=False
    )
    assert "success" in said


tried("a finished job synchronised", sync)
