"""What is chosen while training runs: layouts, exchanges, expert compute. Importing it registers
the choices called `auto`.
"""

from moe_plugin.tuning import compute_tuner, exchange_tuner

__all__ = ["compute_tuner", "exchange_tuner"]
