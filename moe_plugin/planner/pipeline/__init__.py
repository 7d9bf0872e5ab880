"""Schedules of pipeline stages: what a stage computes when, how long it takes, what is alive."""
