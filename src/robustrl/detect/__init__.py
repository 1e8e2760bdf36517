"""Detect: is this member failing? Signals come in, verdicts go out; what to do about them is decided elsewhere."""

from robustrl.detect.cell import ProgressCell
from robustrl.detect.judge import Judgement, MemberView, Verdict, judge
from robustrl.detect.limits import Limits
from robustrl.detect.monitor import Monitor
from robustrl.detect.process import ProcessId, exit_status, start_time

__all__ = [
    "Judgement",
    "Limits",
    "MemberView",
    "Monitor",
    "ProcessId",
    "ProgressCell",
    "Verdict",
    "exit_status",
    "judge",
    "start_time",
]
