"""Schedules of pipeline stages: task order, step time and memory of activations."""
