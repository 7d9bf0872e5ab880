"""torchvision is found, and its operators declared, before anybody else imports it."""

import contextlib

from moe_plugin.hosts.timm.backbone import optional

with contextlib.suppress(ValueError):  # not installed: these tests are skipped
    optional("torchvision")
