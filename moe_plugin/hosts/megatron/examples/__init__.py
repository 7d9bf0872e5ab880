"""Short scripts on Megatron's own training loop, which the launcher finds by name.

Each script is an example from which you can start your own script, and imports nothing from this
package.
"""
