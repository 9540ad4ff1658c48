"""Runs as one HTML page that stands alone: figures with their protocol, the privacy statement in plain words, plots."""

from dpformer.report.page import Report, make_report

__all__ = ["Report", "make_report"]
