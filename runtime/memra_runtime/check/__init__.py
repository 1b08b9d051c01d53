"""memra-check: prove on the user's machine that speculation changes nothing but speed."""

from memra_runtime.check.report import Report
from memra_runtime.check.rig import Options
from memra_runtime.check.run import run_checks

__all__ = ["Options", "Report", "run_checks"]
