"""Schedules of pipeline stages, with the order of tasks, step times and memory of activations."""
