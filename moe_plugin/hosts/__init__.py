"""Host frameworks: translate their configuration, groups, names and losses to this package.

The host packages contain no numerical code of the MoE layer.
"""
