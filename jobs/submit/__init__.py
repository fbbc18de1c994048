"""From a group to submitted jobs: what is asked, decided, sent, controlled."""
