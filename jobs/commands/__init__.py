"""The commands of lathe-jobs: what sends, what looks, what changes."""
