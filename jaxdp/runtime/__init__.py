"""Several processes as one job: how they start, stop and end."""
