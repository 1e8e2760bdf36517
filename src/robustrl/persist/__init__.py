"""What must outlive a process: the trajectory ledger and the trainer's snapshots.

`trajectory` is the life of one answer, `ledger` decides, `store` keeps, `service` and `client` join processes,
`snapshot` (which alone needs torch) keeps trainer state.
"""

from robustrl.persist.client import LeaseWriter, LedgerClient
from robustrl.persist.ledger import Ledger, Prompts
from robustrl.persist.records import (
    END,
    RESTART,
    Audit,
    Batch,
    End,
    LeaseGrant,
    Outcome,
    Prompt,
    Rewound,
    Sample,
    Scored,
    Segment,
)
from robustrl.persist.service import LedgerService
from robustrl.persist.store import Store

__all__ = [
    "END",
    "RESTART",
    "Audit",
    "Batch",
    "End",
    "LeaseGrant",
    "LeaseWriter",
    "Ledger",
    "LedgerClient",
    "LedgerService",
    "Outcome",
    "Prompt",
    "Prompts",
    "Rewound",
    "Sample",
    "Scored",
    "Segment",
    "Store",
]
