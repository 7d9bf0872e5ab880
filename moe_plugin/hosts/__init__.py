"""Hosts: translations of config, groups, names and losses. No maths here."""
