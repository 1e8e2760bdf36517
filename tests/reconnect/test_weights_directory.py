"""The directory's decisions, drawn at random and by hand."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from robustrl.errors import FencedError, WeightError
from robustrl.reconnect import Directory, Offer
from robustrl.reconnect.directory import MAX_DEPTH
from robustrl.roles import Identity, Member, Version

TRAINER, FIRST, SECOND, THIRD, FOURTH = (
    Identity.parse(text) for text in ("trainer/0#1", "rollout/0#1", "rollout/1#1", "r/2#1", "r/3#1")
)
NEW = Offer(Version(1, 1), "d1")
NEXT = Offer(Version(1, 2), "d2")


def publish(directory: Directory, offer: Offer, who: Identity = TRAINER) -> None:
    directory.announce(who, {"tcp": str(who)}, [offer], origin=True, publish=offer.version)


def relay(directory: Directory, who: Identity, *held: Offer) -> None:
    directory.announce(who, {"tcp": str(who)}, held, origin=False)


def test_a_relay_is_asked_before_the_publisher() -> None:
    directory = Directory()
    publish(directory, NEW)
    found = directory.assign(FIRST, NEW.version, 0.0)
    assert found is not None
    assert (found.source, found.endpoints, found.digest) == (TRAINER, {"tcp": "trainer/0#1"}, "d1")
    relay(directory, FIRST, NEW)
    found = directory.assign(SECOND, NEW.version, 0.0)
    assert found is not None
    assert found.source == FIRST


def test_a_source_has_only_so_many_pullers_until_they_release_it_or_are_not_heard_of() -> None:
    directory = Directory(pullers_per_source=2, lease_s=30)
    publish(directory, NEW)
    assert directory.assign(FIRST, NEW.version, 0.0)
    assert directory.assign(SECOND, NEW.version, 0.0)
    assert directory.assign(THIRD, NEW.version, 1.0) is None
    assert directory.next_change(1.0) == 30.0
    directory.renew(SECOND, TRAINER, 20.0)
    assert directory.assign(THIRD, NEW.version, 31.0)
    assert directory.assign(FIRST, NEW.version, 31.0) is None
    directory.release(SECOND, TRAINER, 32.0)
    assert directory.assign(FIRST, NEW.version, 32.0)


def test_a_source_that_failed_is_avoided_by_the_one_and_the_last_choice_of_the_others() -> None:
    directory = Directory(pullers_per_source=2, avoid_s=10)
    publish(directory, NEW)
    relay(directory, FIRST, NEW)
    directory.release(SECOND, FIRST, 0.0, failed=True)
    for puller in (SECOND, THIRD):
        found = directory.assign(puller, NEW.version, 1.0)
        assert found is not None
        assert found.source == TRAINER
    directory.retire(TRAINER)
    assert directory.assign(SECOND, NEW.version, 2.0) is None
    assert directory.assign(THIRD, NEW.version, 2.0)
    assert directory.assign(SECOND, NEW.version, 10.5)


def arriving(directory: Directory, who: Identity, offer: Offer = NEW) -> None:
    directory.relay(who, {"tcp": f"{who} early"}, offer.version, offer.digest)


def test_pullers_form_a_chain_while_the_version_is_on_its_way() -> None:
    directory = Directory()
    publish(directory, NEW)
    sources = []
    for puller in (FIRST, SECOND, THIRD):
        found = directory.assign(puller, NEW.version, 0.0)
        assert found is not None
        sources.append((found.source, found.depth))
        assert directory.assign(FOURTH, NEW.version, 0.0) is None  # it has not got anything to give on yet
        arriving(directory, puller)
    assert sources == [(TRAINER, 0), (FIRST, 1), (SECOND, 2)]
    relay(directory, FIRST, NEW)  # it has all of it now, and one puller
    directory.release(FIRST, TRAINER, 1.0)
    found = directory.assign(FOURTH, NEW.version, 1.0)
    assert found is not None
    assert (found.source, found.depth) == (TRAINER, 0)


def test_a_chain_never_bites_its_tail_and_does_not_grow_for_ever() -> None:
    directory = Directory()
    publish(directory, NEW)
    chain = [Identity(Member("rollout", index), 1) for index in range(MAX_DEPTH + 2)]
    for depth, who in enumerate(chain[:-1]):
        assignment = directory.assign(who, NEW.version, 0.0)
        assert assignment is not None
        assert assignment.depth == depth
        arriving(directory, who)
    assert directory.assign(chain[-1], NEW.version, 0.0) is None
    # The first loses the trainer: all the others live on what it gives them.
    directory.release(chain[0], TRAINER, 1.0, failed=True)
    assert directory.assign(chain[0], NEW.version, 1.0) is None


def test_a_frozen_member_of_a_chain_holds_no_place_once_the_next_has_noticed() -> None:
    directory = Directory()
    publish(directory, NEW)
    directory.assign(FIRST, NEW.version, 0.0)
    arriving(directory, FIRST)
    assert directory.assign(SECOND, NEW.version, 0.0)
    directory.release(SECOND, FIRST, 1.0, failed=True)
    found = directory.assign(SECOND, NEW.version, 1.0)
    assert found is not None
    assert found.source == TRAINER


def test_a_relay_that_has_given_the_version_up_is_not_named_again() -> None:
    directory = Directory()
    publish(directory, NEW)
    directory.assign(FIRST, NEW.version, 0.0)
    arriving(directory, FIRST)
    found = directory.assign(SECOND, NEW.version, 0.0)
    assert found is not None
    directory.release(SECOND, found.source, 0.0, gone=True)
    assert directory.assign(SECOND, NEW.version, 0.0) is None
    with pytest.raises(WeightError, match="another content"):
        directory.relay(FIRST, {}, NEW.version, "other")


def test_those_who_can_map_a_holders_memory_do_not_count_and_go_there_first() -> None:
    directory = Directory()
    directory.announce(TRAINER, {"tcp": "far"}, [NEW], origin=True, publish=NEW.version, host="here")
    assert directory.assign(FIRST, NEW.version, 0.0, host="elsewhere")
    for puller in (SECOND, THIRD):
        found = directory.assign(puller, NEW.version, 0.0, host="here")
        assert found is not None
        assert found.source == TRAINER
    assert directory.assign(FOURTH, NEW.version, 0.0, host="elsewhere") is None
    assert directory.assign(FOURTH, NEW.version, 0.0) is None


def test_a_version_has_one_content_for_ever() -> None:
    directory = Directory()
    publish(directory, NEW)
    publish(directory, NEW)
    with pytest.raises(WeightError, match="another content"):
        publish(directory, Offer(NEW.version, "other"))
    with pytest.raises(WeightError, match="another content"):
        relay(directory, FIRST, NEXT, Offer(NEW.version, "other"))
    assert directory.holders(NEXT.version) == []
    assert directory.refused == {"trainer/0#1": 1, "rollout/0#1": 1}


def test_publications_go_up_and_restatements_need_not() -> None:
    directory = Directory()
    relay(directory, FIRST, NEXT)
    with pytest.raises(WeightError, match="not above the newest"):
        publish(directory, NEW)
    directory.announce(TRAINER, {}, [NEW, NEXT], origin=True)
    assert directory.newest() == NEXT
    assert directory.newest(step=1) == NEW
    assert directory.newest(newer_than=NEXT.version) is None


def test_fencing_forgets_older_incarnations_and_refuses_them() -> None:
    directory = Directory()
    publish(directory, NEW)
    directory.fence(TRAINER.member, 2)
    assert directory.newest() is None
    for act in (
        lambda: publish(directory, NEXT),
        lambda: directory.assign(TRAINER, NEW.version, 0.0),
        lambda: directory.release(TRAINER, FIRST, 0.0),
    ):
        with pytest.raises(FencedError):
            act()
    assert directory.refused == {"trainer/0#1": 3}
    publish(directory, Offer(Version(2, 1), "d1"), Identity(TRAINER.member, 2))


STEPS = st.integers(1, 4)
INCARNATIONS = st.integers(1, 3)


class DirectoryMachine(RuleBasedStateMachine):
    """Any order of announcements, pulls, failures, fences and restarts keeps the directory's promises."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(pullers_per_source=2, lease_s=5.0, avoid_s=3.0)
        self.now = 0.0
        self.floors: dict[Member, int] = {}
        self.digests: dict[Version, str] = {}
        self.published: list[Version] = []
        self.leases: dict[Identity, tuple[Identity, Version, float]] = {}
        """By puller: its source, what it pulls, and until when."""
        self.suspect: dict[Identity, float] = {}
        self.early: set[tuple[Identity, Version]] = set()

    def fenced(self, who: Identity) -> bool:
        return who.incarnation < self.floors.get(who.member, 0)

    def seen(self, who: Identity) -> None:
        self.floors[who.member] = max(self.floors.get(who.member, 0), who.incarnation)

    @rule(attempt=INCARNATIONS, step=STEPS, digest=st.sampled_from("abc"))
    def publish(self, attempt: int, step: int, digest: str) -> None:
        who, version = Identity(Member("trainer"), attempt), Version(attempt, step)
        try:
            publish(self.directory, Offer(version, digest), who)
        except FencedError:
            assert self.fenced(who)
        except WeightError:
            self.seen(who)
            assert self.digests.get(version, digest) != digest or version <= max(self.digests)
        else:
            assert not self.fenced(who)
            self.seen(who)
            assert self.digests.setdefault(version, digest) == digest
            if version not in self.published:
                assert not self.published or version > self.published[-1]
                self.published.append(version)

    @precondition(lambda self: self.digests)
    @rule(index=st.integers(0, 3), incarnation=INCARNATIONS, data=st.data())
    def relay(self, index: int, incarnation: int, data: st.DataObject) -> None:
        who = Identity(Member("rollout", index), incarnation)
        version = data.draw(st.sampled_from(sorted(self.digests)))
        try:
            relay(self.directory, who, Offer(version, self.digests[version]))
        except FencedError:
            assert self.fenced(who)
        else:
            assert not self.fenced(who)
            self.seen(who)

    @rule(
        index=st.integers(0, 5),
        incarnation=INCARNATIONS,
        attempt=INCARNATIONS,
        step=STEPS,
        then=st.sampled_from(["pulls", "gives on", "fails"]),
    )
    def pull(self, index: int, incarnation: int, attempt: int, step: int, then: str) -> None:
        who, version = Identity(Member("rollout", index), incarnation), Version(attempt, step)
        try:
            found = self.directory.assign(who, version, self.now)
        except FencedError:
            assert self.fenced(who)
            return
        self.seen(who)
        self.leases.pop(who, None)
        if found is None:
            return
        whole = found.source in self.directory.holders(version)
        assert whole or (found.source, version) in self.early
        assert whole == (found.depth == 0)
        assert found.digest == self.digests[version]
        self.leases[who] = found.source, version, self.now + 5.0
        behind = [
            each
            for each, (source, _, until) in self.leases.items()
            if source == found.source and until > self.now and not self.fenced(each)
        ]
        assert len([each for each in behind if self.suspect.get(each, -1) <= self.now]) <= 2
        at, hops = who, 0
        while at not in self.directory.holders(version):  # whatever it gets comes from someone who has it
            at, pulled, until = self.leases[at]
            assert pulled == version
            assert until > self.now
            assert at != who
            hops += 1
        assert hops == found.depth + 1
        if then == "gives on":
            self.directory.relay(who, {"tcp": str(who)}, version, found.digest)
            self.early.add((who, version))
        elif then == "fails":
            self.directory.release(who, found.source, self.now, failed=True)
            self.suspect[found.source] = self.now + 3.0
            self.leases.pop(who)
            again = self.directory.assign(who, version, self.now)
            assert again is None or again.source != found.source
            if again is not None:
                self.directory.release(who, again.source, self.now)

    @rule(role=st.sampled_from(["trainer", "rollout"]), index=st.integers(0, 3), incarnation=INCARNATIONS)
    def fence(self, role: str, index: int, incarnation: int) -> None:
        member = Member(role, 0 if role == "trainer" else index)
        self.directory.fence(member, incarnation)
        self.floors[member] = max(self.floors.get(member, 0), incarnation)

    @rule(seconds=st.floats(0.1, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nobody_fenced_is_a_source(self) -> None:
        for version in self.digests:
            for who in self.directory.holders(version):
                assert not self.fenced(who)


DirectoryMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
test_any_history = DirectoryMachine.TestCase
