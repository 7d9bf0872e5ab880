"""Adapters for host frameworks, which translate their configuration, process groups, names and
losses to those of this package.

The host packages do not contain any numerical code of the MoE layer.
"""
