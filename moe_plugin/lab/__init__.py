"""What is built with the layer: measuring, emulated clusters, planning, a vision model. Runs import
nothing of it.
"""
