"""SwinV2-MoE: image classification with our layer in a backbone of timm.

    python -m moe_plugin.hosts.timm.train --example digits --data IMAGES --out runs/digits
"""
