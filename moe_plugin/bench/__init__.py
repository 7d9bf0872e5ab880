"""Measuring: the layer beside its peers, each kernel beside its reference, against bounds taken in
the same run.
"""
