"""The code that a job runs: snapshots, repositories, secrets kept out, clean-up."""
