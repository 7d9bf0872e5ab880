"""Simulated schedules of pipelines: order of tasks, time and memory for activations."""
