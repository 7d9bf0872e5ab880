"""Schedules of collectives, beside others: simulated, explained, exported."""
