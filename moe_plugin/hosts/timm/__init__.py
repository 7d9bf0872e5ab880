"""SwinV2-MoE: image models that have MoE layers in a backbone from timm.

    python -m moe_plugin.hosts.timm.train --example digits --data IMAGES --out runs/digits
"""
