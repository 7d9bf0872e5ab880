"""Small tools without knowledge of experts: messages, files, registries, this machine."""
