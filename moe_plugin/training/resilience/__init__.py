"""Features for runs in which a rank is lost, computes wrong results, exceeds a buffer or is
stopped.

The run continues or ends with a clear message. The behavior is the same in every host.
"""
