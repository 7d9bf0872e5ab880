"""Simulate the schedules of pipeline stages: the order of tasks, the time of a step, and the memory
for activations.
"""
