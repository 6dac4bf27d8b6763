"""Checks that users may run on models of their own."""

from emfed.testing.contract import CHECKS, Report, check_model

__all__ = ["CHECKS", "Report", "check_model"]
