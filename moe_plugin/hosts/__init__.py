"""Adapters for host frameworks, which translate their configuration, process groups, names and
losses to those of this package.

The host packages contain none of the numerical code of the MoE layer.
"""
