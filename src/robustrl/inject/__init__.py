"""Faults on purpose: schedules, signals from outside, and members that end themselves at an exact boundary."""

from robustrl.inject.injector import Injector, Target
from robustrl.inject.schedule import Fault, check, default_schedule, parse, random_schedule, to_text

__all__ = ["Fault", "Injector", "Target", "check", "default_schedule", "parse", "random_schedule", "to_text"]
