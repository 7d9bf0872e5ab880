"""Features for runs in which a rank fails, computes wrong results, exceeds a buffer or is stopped.

In these cases, the run either continues or ends with a clear message. The behavior is the same in
every host framework.
"""
