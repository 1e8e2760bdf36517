"""Attach: how an adapter gets into a framework that knows nothing of it, switched on by flags.

What every adapter needs stands here once: callbacks after an import, wrapping patches that check what they wrap, our
flags taken out of a command line, and the launcher behind ``robustrl run``. It knows no framework by name; an adapter
is found through the entry point group ``robustrl.adapters``.
"""

from robustrl.attach.adapter import Adapter, find_adapter
from robustrl.attach.flags import Flags, extract
from robustrl.attach.hooks import after_import
from robustrl.attach.patches import Patch, applied, assert_applied, extend, undo_all, wrap
from robustrl.attach.session import Session

__all__ = [
    "Adapter",
    "Flags",
    "Patch",
    "Session",
    "after_import",
    "applied",
    "assert_applied",
    "extend",
    "extract",
    "find_adapter",
    "undo_all",
    "wrap",
]
