"""Reports: what a run did and what its faults cost, from its events alone."""

from robustrl.report.ettr import Ettr, ettr, regenerated_tokens
from robustrl.report.leftovers import leftovers
from robustrl.report.live import LiveState, LiveView
from robustrl.report.recovery import Recovery, bystander_restarts, recoveries
from robustrl.report.summary import Compared, Summary, compare, read_summary, summarize, write_summary
from robustrl.report.text import compare_table, recovery_table, summary_tables
from robustrl.report.timeline import draw_timeline

__all__ = [
    "Compared",
    "Ettr",
    "LiveState",
    "LiveView",
    "Recovery",
    "Summary",
    "bystander_restarts",
    "compare",
    "compare_table",
    "draw_timeline",
    "ettr",
    "leftovers",
    "read_summary",
    "recoveries",
    "recovery_table",
    "regenerated_tokens",
    "summarize",
    "summary_tables",
    "write_summary",
]
