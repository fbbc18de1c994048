"""What people see of jobs: tables, logs, scores, pages."""
