"""The commands of lathe-jobs: those that submit, those that read, those that change jobs."""
