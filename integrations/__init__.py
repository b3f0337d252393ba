"""Adapters for other products, each imported as ``rl_staleness.integrations.<product>``.

Nothing is imported here: a module of this package needs its product installed, this one does not.
"""
