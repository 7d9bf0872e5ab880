"""Schedules of collectives, compared with others: simulated, explained, exported."""
