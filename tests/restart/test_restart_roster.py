"""Membership and its memory: one state a member, legal moves only, nothing forgotten in a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from robustrl import events
from robustrl.config import RobustConfig
from robustrl.detect import ProcessId
from robustrl.errors import ConfigError, IllegalMoveError
from robustrl.restart import JobSpec, Journal, Loss, MemberRecord, MemberState, RoleSpec, Roster
from robustrl.restart.journal import JobState
from robustrl.restart.membership import LIVING, MOVES
from robustrl.roles import Identity, Member

MEMBERS = [Member("trainer"), Member("rollout", 0), Member("rollout", 1), Member("standby")]
members = st.sampled_from(MEMBERS)
states = st.sampled_from(MemberState)


class RosterMachine(RuleBasedStateMachine):
    """Any moves in any order, against a model that only knows the table of moves."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []
        self.kept: dict[Member, MemberRecord] = {}
        self.roster = Roster([], self.said.append, self._keep)
        self.model = dict.fromkeys(MEMBERS, MemberState.ABSENT)
        self.incarnations = dict.fromkeys(MEMBERS, 0)
        self.served: set[Identity] = set()

    def _keep(self, record: MemberRecord) -> None:
        self.kept[record.member] = record

    @rule(member=members, state=states)
    def move(self, member: Member, state: MemberState) -> None:
        before, said = self.roster[member], len(self.said)
        if state not in MOVES[self.model[member]]:
            with pytest.raises(IllegalMoveError, match=str(before.identity)):
                self.roster.move(member, state, "no")
            assert self.roster[member] == before
            assert len(self.said) == said
            return
        record = self.roster.move(member, state, "a cause")
        assert self.said[said:] == [
            events.MemberMoved(
                member=str(member),
                incarnation=record.incarnation,
                before=self.model[member],
                after=state,
                cause="a cause",
                pid=record.process.pid if record.process else 0,
            )
        ]
        self.model[member] = state
        if state is MemberState.STARTING:
            assert record.incarnation == self.incarnations[member] + 1
            assert record.process is None and record.origin is None and not record.served
            self.incarnations[member] += 1
        if state is MemberState.SERVING:
            self.served.add(record.identity)

    @rule(member=members, pid=st.integers(1, 99))
    def process(self, member: Member, pid: int) -> None:
        if self.roster[member].living:
            assert self.roster.set_process(member, ProcessId(pid, 7)).process == ProcessId(pid, 7)

    @rule()
    def successor(self) -> None:
        """A new supervisor reads what the old one kept."""
        self.roster = Roster(list(self.kept.values()), self.said.append, self._keep)

    @invariant()
    def agrees(self) -> None:
        for member in MEMBERS:
            record = self.roster[member]
            assert record.state is self.model[member]
            assert record.incarnation == self.incarnations[member]
            assert record.living == (record.state in LIVING)
            assert record.served == (record.identity in self.served)
            assert self.roster.current(record.identity) == record.living
            assert not self.roster.current(Identity(member, record.incarnation - 1))
            assert not self.roster.current(Identity(member, record.incarnation + 1))
            if record.incarnation:
                assert self.kept[member] == record
        assert {r.member for r in self.roster.living()} == {m for m, s in self.model.items() if s in LIVING}


TestRoster = RosterMachine.TestCase


def test_a_promotion_remembers_whose_process_it_goes_on_with() -> None:
    roster = Roster([], events.ignore)
    standby = Identity(Member("standby"), 1)
    roster.move(Member("trainer"), MemberState.STARTING, origin=standby)
    assert roster[Member("trainer")].origin == standby


@given(states, states)
def test_every_state_can_be_left_for_a_new_start_or_lives(one: MemberState, other: MemberState) -> None:
    assert one in LIVING or MemberState.STARTING in MOVES[one]
    assert (MemberState.DEAD in MOVES[one]) == (one in LIVING)
    assert one not in MOVES[one] and other in MemberState


# -- the journal --------------------------------------------------------------------------------------------------

RECORD = MemberRecord(
    Member("rollout", 1), 3, MemberState.SERVING, ProcessId(5, 77), Identity(Member("standby"), 2), True, "promotion"
)
LOSS = Loss(Identity(Member("rollout", 1), 2), 12.5, 4, "killed", True, recovered=True, handled=True)


def fill(path: Path) -> Journal:
    journal = Journal(path)
    journal.put_record(MemberRecord(Member("rollout", 1), 1, MemberState.STARTING))
    journal.put_record(RECORD)
    journal.put_record(MemberRecord(Member("trainer"), 1, MemberState.STARTING))
    journal.put_losses([LOSS])
    journal.put_losses([LOSS, LOSS])
    journal.put_job(JobState("", "", (1.0, 2.0)))
    return journal


def read(path: Path) -> tuple[list[MemberRecord], list[Loss], JobState]:
    journal = Journal(path)
    try:
        return journal.records(), journal.losses(), journal.job()
    finally:
        journal.close()


EXPECTED = (
    [RECORD, MemberRecord(Member("trainer"), 1, MemberState.STARTING)],
    [LOSS, LOSS],
    JobState("", "", (1.0, 2.0)),
)


def test_a_new_journal_knows_nothing(tmp_path: Path) -> None:
    assert read(tmp_path / "supervisor.db") == ([], [], JobState())


def test_a_journal_gives_back_what_it_was_given(tmp_path: Path) -> None:
    fill(tmp_path / "supervisor.db").close()
    assert read(tmp_path / "supervisor.db") == EXPECTED


def test_a_journal_loses_nothing_when_its_writer_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from test_restart_roster import fill\n"
        "journal = fill(Path(sys.argv[2])); os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path / "supervisor.db")],
        check=False,
        timeout=60,
    )
    assert ended.returncode == -9
    assert read(tmp_path / "supervisor.db") == EXPECTED


# -- the job's description ----------------------------------------------------------------------------------------


def job(*roles: RoleSpec) -> JobSpec:
    return JobSpec(roles=roles, config=RobustConfig())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (job(RoleSpec("rollout", ("x",))), "no trainer"),
        (job(RoleSpec("trainer", ("x",)), RoleSpec("trainer", ("x",))), "given twice"),
        (job(RoleSpec("trainer", ("x",)), RoleSpec("supervisor", ("x",))), "not a role of the job"),
        (job(RoleSpec("trainer", ())), "needs a command"),
        (job(RoleSpec("trainer", ("x",), -1)), "needs a command and a count"),
        (job(RoleSpec("Trainer", ("x",))), "not a role name"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(spec: JobSpec, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec.check()


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    spec = job(
        RoleSpec("trainer", ("x", "y")), RoleSpec("rollout", ("z",), 2), RoleSpec("standby", ("s",), 1, ("rollout",))
    )
    spec.save(tmp_path / "job.json")
    assert JobSpec.load(tmp_path / "job.json") == spec
    assert [str(m) for m in spec.members()] == ["trainer/0", "rollout/0", "rollout/1", "standby/0"]
    assert spec.standby_for("rollout") and not spec.standby_for("trainer")
    (tmp_path / "job.json").write_text('{"roles": 3}')
    with pytest.raises(ConfigError, match="cannot read the job"):
        JobSpec.load(tmp_path / "job.json")
