"""Reconnect: weights flow again. Versioned, pulled, point to point; no group, no rank, no barrier.

A `WeightPublisher` freezes a version and serves it; a `WeightSubscriber` asks the `Directory` who holds the newest,
pulls it chunk by chunk, commits it whole or not at all, and then serves it on. Importing this imports no torch.
"""

from robustrl.reconnect.content import weights_digest
from robustrl.reconnect.directory import Assignment, Directory, Offer
from robustrl.reconnect.memory import MemoryReport, StagingError
from robustrl.reconnect.publisher import Published, WeightPublisher
from robustrl.reconnect.service import DirectoryClient, DirectoryService
from robustrl.reconnect.sharding import Slice
from robustrl.reconnect.subscriber import HeldVersion, WeightSubscriber

__all__ = [
    "Assignment",
    "Directory",
    "DirectoryClient",
    "DirectoryService",
    "HeldVersion",
    "MemoryReport",
    "Offer",
    "Published",
    "Slice",
    "StagingError",
    "WeightPublisher",
    "WeightSubscriber",
    "weights_digest",
]
