"""Errors that are the caller's to mend. The command line prints them as one line and exits with 2."""


class DPFormerError(Exception):
    """Base of all errors whose message alone tells what is wrong, where, and the cure."""


class DataError(DPFormerError):
    """A log, a column, a row or a prepared folder is not what it has to be."""


class ClippingError(DPFormerError):
    """A gradient could reach a parameter without being in its norm; nothing was released."""


class PrivacyError(DPFormerError):
    """A privacy parameter is out of range, a budget would be overspent, or a record of it is not sound."""


class RankError(DPFormerError):
    """Another process of this training has ended, hangs, or is out of step."""
