"""The state machine of one trajectory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robustrl.errors import IllegalMoveError
from robustrl.persist.trajectory import (
    DONE,
    Append,
    Commit,
    Consume,
    Discard,
    Fail,
    Finish,
    GiveUp,
    Lease,
    Release,
    Reopen,
    State,
    Trajectory,
    advance,
)
from robustrl.roles import Identity, Member

A = Identity(Member("rollout", 0), 1)
B = Identity(Member("rollout", 1), 1)


def after(*moves: object) -> Trajectory:
    now = Trajectory("0/0")
    for move in moves:
        now = advance(now, move)  # type: ignore[arg-type]
    return now


def test_a_whole_life_ends_committed() -> None:
    now = after(Lease(A, 1), Append(A, 1, 0, 3), Finish(A, 1, 3, 0.5, "eos"), Consume(1), Commit())
    assert (now.state, now.tokens, now.reward, now.step, now.attempt) == (State.COMMITTED, 3, 0.5, 1, 1)


def test_a_released_trajectory_keeps_its_tokens_for_the_next_owner() -> None:
    now = after(Lease(A, 1), Append(A, 1, 0, 3), Release(), Lease(B, 2), Append(B, 2, 3, 2))
    assert (now.owner, now.tokens) == (B, 5)


def test_a_failure_is_no_reward_and_a_restart_drops_the_tokens() -> None:
    kept = after(Lease(A, 1), Append(A, 1, 0, 3), Fail(A, 1, "engine", True))
    assert (kept.state, kept.reward, kept.tokens, kept.failure) == (State.FAILED, None, 3, "engine")
    assert after(Lease(A, 1), Append(A, 1, 0, 3), Fail(A, 1, "restart", False)).tokens == 0


@pytest.mark.parametrize(
    "moves",
    [
        (Append(A, 1, 0, 1),),
        (Lease(A, 1), Append(B, 1, 0, 1)),
        (Lease(A, 1), Append(A, 1, 1, 1)),
        (Lease(A, 1), Lease(B, 2)),
        (Lease(A, 1), Release(), Lease(B, 1)),
        (Lease(A, 1), Append(A, 1, 0, 2), Finish(A, 1, 3, 1.0, "")),
        (Lease(A, 1), Finish(A, 1, 0, float("nan"), "")),
        (Lease(A, 1), Consume(1)),
        (Lease(A, 1), Finish(A, 1, 0, 1.0, ""), Consume(1), Consume(2)),
        (Lease(A, 1), Finish(A, 1, 0, 1.0, ""), Commit()),
        (Lease(A, 1), Finish(A, 1, 0, 1.0, ""), Lease(B, 2)),
        (Lease(A, 1), Finish(A, 1, 0, 1.0, ""), Consume(1), Commit(), Discard()),
        (Reopen(),),
    ],
)
def test_an_illegal_move_is_refused_and_says_what_was_tried(moves: tuple[object, ...]) -> None:
    now = after(*moves[:-1])
    with pytest.raises(IllegalMoveError, match=rf"0/0 cannot take {type(moves[-1]).__name__}"):
        advance(now, moves[-1])  # type: ignore[arg-type]


def test_a_move_that_was_made_before_changes_nothing() -> None:
    finish = Finish(A, 1, 0, 1.0, "")
    for moves in ((finish,), (finish, Consume(4)), (finish, Consume(4), Commit())):
        now = after(Lease(A, 1), *moves)
        assert advance(now, moves[-1]) is now
        assert advance(now, finish) is now


MOVES = st.one_of(
    st.builds(Lease, st.sampled_from([A, B]), st.integers(1, 4)),
    st.builds(Append, st.sampled_from([A, B]), st.integers(1, 4), st.integers(0, 3), st.integers(1, 2)),
    st.builds(
        Finish, st.sampled_from([A, B]), st.integers(1, 4), st.integers(0, 3), st.sampled_from([0.0, 1.0]), st.just("")
    ),
    st.builds(Fail, st.sampled_from([A, B]), st.integers(1, 4), st.just("engine"), st.booleans()),
    st.builds(Consume, st.integers(1, 2)),
    st.sampled_from([Release(), Commit(), Reopen(), Discard()]),
)


@given(st.lists(MOVES, max_size=40))
def test_no_sequence_of_moves_leaves_the_rules(moves: list[object]) -> None:
    now = Trajectory("7/1")
    for move in moves:
        try:
            then = advance(now, move)  # type: ignore[arg-type]
        except IllegalMoveError:
            continue
        assert then.attempt >= now.attempt
        assert (then.owner is not None) == (then.state is State.LEASED or then.state in DONE)
        assert (then.reward is not None) == (then.state in DONE)
        assert (then.step > 0) == (then.state in (State.CONSUMED, State.COMMITTED))
        if now.state in DONE and then.state in DONE:
            assert (then.tokens, then.reward) == (now.tokens, now.reward)
        if now.step and then.step:
            assert now.step == then.step
        now = then


def test_every_state_is_reachable() -> None:
    path = (Lease(A, 1), Finish(A, 1, 0, 1.0, ""), Consume(1), Commit())
    seen = {State.ISSUED, after(Lease(A, 1), Fail(A, 1, "x", True)).state, after(GiveUp("x")).state}
    seen |= {now.state for now in itertools.accumulate(path, advance, initial=Trajectory("0/0"))}  # type: ignore[arg-type]
    assert seen == set(State)
