"""SwinV2-MoE: image classification with our layer in a backbone of timm.

    python -m moe_plugin.vision.train --example digits --data runs/digits-images --out runs/digits
"""
