"""Errors of the compiler's inside: a bug in a builder or a pass, or bad IR text."""


class IRError(Exception):
    """The IR breaks one of its own rules."""


class OpError(IRError):
    """An op was given operands it does not take."""
