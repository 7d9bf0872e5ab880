"""Runs that go on, or end with a clear message, when a rank is lost, computes wrongly, overflows or
stops: the same in every host.
"""
