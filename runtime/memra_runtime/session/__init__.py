"""Sessions: texts that are continued round by round on a loaded model."""

from memra_runtime.session.file import read_session, save_session
from memra_runtime.session.policy import Policy
from memra_runtime.session.request import check_request
from memra_runtime.session.session import Session
from memra_runtime.session.snapshot import Snapshot
from memra_runtime.session.stats import Stats

__all__ = [
    "Policy",
    "Session",
    "Snapshot",
    "Stats",
    "check_request",
    "read_session",
    "save_session",
]
