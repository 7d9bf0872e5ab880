"""SwinV2-MoE, which are image models with MoE layers in a backbone of timm.

    python -m moe_plugin.hosts.timm.train --example digits --data IMAGES --out runs/digits
"""
