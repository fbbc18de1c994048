"""From a group to submitted jobs: request, decision, submission, control."""
