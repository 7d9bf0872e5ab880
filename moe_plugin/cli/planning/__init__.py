"""Plans of models on clusters, and what the commands compute and explain. Never imports torch."""
