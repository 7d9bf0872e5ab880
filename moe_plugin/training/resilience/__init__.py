"""Features for runs in which a rank is lost, computes wrong results, overflows or is stopped.

The run continues, or ends with a clear message, and its behavior is the same in every host.
"""
