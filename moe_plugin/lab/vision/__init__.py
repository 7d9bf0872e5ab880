"""SwinV2-MoE: image classification with our layer in a backbone of timm.

    python -m moe_plugin.lab.vision.train --example digits --data IMAGES --out runs/digits
"""
