"""Adapters for other products, one module each, imported as ``rl_staleness.integrations.<product>``.

Nothing is imported here: a module of this package needs its product installed, this one does not.
"""
