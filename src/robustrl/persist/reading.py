"""A ledger file as a person or a script looks at it: counted, checked, exported. Nothing is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from robustrl.persist.records import ITEM, Prompt, unpack_ids, unpack_logprobs
from robustrl.persist.schema import TABLES
from robustrl.persist.store import Rows
from robustrl.persist.trajectory import DONE, State, trajectory_id

_decode_prompt = msgspec.msgpack.Decoder(Prompt).decode
_decode_ids = msgspec.msgpack.Decoder(list[str]).decode


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    groups_per_batch: int
    samples_per_prompt: int
    groups: int
    """Prompts that were ever handed out."""
    states: dict[str, int]
    """Trajectories by state."""
    tokens: int
    """Tokens that are saved (those of compacted steps are not)."""
    consumed: int
    """Newest step whose batch was handed to the optimizer."""
    committed: int
    """Newest step with a durable point."""
    compacted: int
    owners: dict[str, int]
    """Tokens that each member delivered, ever."""
    failures: dict[str, int]
    """Attempts that did not end well, by how they ended."""


def summarize(path: Path | str) -> Summary:
    """Counts what a ledger holds. Raises LedgerError when it cannot be read."""
    rows = Rows.open(path)
    try:
        meta = dict(rows.rows("meta"))
        states = Counter(state for _, _, state, *_ in rows.rows("samples"))
        outcomes = Counter(outcome for *_, outcome, _ in rows.rows("attempts"))
        return Summary(
            groups_per_batch=int(meta.get("groups_per_batch", 0)),
            samples_per_prompt=int(meta.get("samples_per_prompt", 0)),
            groups=sum(1 for _ in rows.rows("groups")),
            states=dict(sorted(states.items())),
            tokens=sum(len(ids) // ITEM for _, _, _, ids, *_ in rows.rows("segments")),
            consumed=max((int(step) for step, *_ in rows.rows("consumption")), default=0),
            committed=int(meta.get("committed", 0)),
            compacted=int(meta.get("compacted", 0)),
            owners={owner: int(tokens) for owner, tokens in rows.rows("owners")},
            failures={name: count for name, count in sorted(outcomes.items()) if name not in ("open", "finished")},
        )
    finally:
        rows.close()


def verify(path: Path | str) -> list[str]:
    """What is wrong with a ledger, a line each: damaged rows, gaps between tokens, trajectories that are in two steps,
    or in a step and not there. Empty when all is well. Raises LedgerError when it cannot be read."""
    rows = Rows.open(path)
    try:
        return list(_problems(rows))
    finally:
        rows.close()


def _problems(rows: Rows) -> Iterator[str]:
    meta = dict(rows.rows("meta"))
    committed, compacted = int(meta.get("committed", 0)), int(meta.get("compacted", 0))
    spans = {int(step): (_decode_ids(ids), int(after)) for step, _, ids, after in rows.rows("consumption")}
    gone = spans[compacted][1] if compacted in spans else 0
    lengths: Counter[str] = Counter()
    for group, sample, start, ids, logprobs, *_ in rows.rows("segments"):
        name = trajectory_id(group, sample)
        if start != lengths[name]:
            yield f"trajectory {name}: tokens {lengths[name]} to {start} are missing"
        if len(ids) != len(logprobs):
            yield f"trajectory {name}: {len(ids) // ITEM} tokens from {start} on and other log-probabilities"
        lengths[name] = start + len(ids) // ITEM
    states = {trajectory_id(group, sample): State(state) for group, sample, state, *_ in rows.rows("samples")}
    steps = {trajectory_id(group, sample): step for group, sample, *_, step, _ in rows.rows("samples")}
    seen: dict[str, int] = {}
    for step, (names, _) in sorted(spans.items()):
        for name in names:
            if name in seen:
                yield f"trajectory {name} was consumed by step {seen[name]} and by step {step}"
            seen[name] = step
            wanted = State.COMMITTED if step <= committed else State.CONSUMED
            if states.get(name) is not wanted or steps.get(name) != step:
                found = f"{states[name]} for step {steps[name]}" if name in states else "not there"
                yield f"trajectory {name} belongs to step {step} and is {found}"
    for name, state in states.items():
        if state in (State.CONSUMED, State.COMMITTED) and name not in seen:
            yield f"trajectory {name} is {state} and in no step"
        if state in DONE and name not in lengths and int(name.partition("/")[0]) >= gone:
            yield f"trajectory {name} is {state} and has no tokens"
    for table in ("groups", "attempts", "fences", "owners"):
        for _ in rows.rows(table):
            pass
    for table, key in rows.damaged:
        where = ", ".join(f"{column} {value!r}" for column, value in zip(TABLES[table].columns, key, strict=False))
        yield f"a row of {table} is damaged: {where}"


def export(path: Path | str) -> Iterator[dict[str, Any]]:
    """Each trajectory of a ledger, in the order of prompts, as plain values for JSON.

    `ids`, `logprobs` and `trained` have one entry a token; `segments` says which version and member made which run of
    tokens. A prompt of bytes is given as text where it is UTF-8, else in hexadecimal. Raises LedgerError.
    """
    rows = Rows.open(path)
    try:
        prompts = {index: _decode_prompt(prompt) for index, prompt, *_ in rows.rows("groups")}
        # Both in the order of (group, sample): one pass over each, however large they are.
        segments = rows.rows("segments")
        ahead = next(segments, None)
        for group, sample, state, attempt, owner, reward, reason, step, failure in rows.rows("samples"):
            made = []
            while ahead is not None and (ahead[0], ahead[1]) == (group, sample):
                made.append(ahead)
                ahead = next(segments, None)
            yield {
                "id": trajectory_id(group, sample),
                "prompt": _readable(prompts.get(group, b"")),
                "state": state,
                "step": step or None,
                "attempt": attempt,
                "owner": owner,
                "reward": reward,
                "finish_reason": reason,
                "failure": failure,
                "ids": [one for row in made for one in unpack_ids(row[3])],
                "logprobs": [one for row in made for one in unpack_logprobs(row[4])],
                "trained": [bool(row[7]) for row in made for _ in range(len(row[3]) // ITEM)],
                "segments": [
                    {"start": row[2], "tokens": len(row[3]) // ITEM, "version": row[5], "owner": row[6]} for row in made
                ],
            }
    finally:
        rows.close()


def _readable(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, list):
        return prompt
    try:
        return prompt.decode()
    except UnicodeDecodeError:
        return prompt.hex()
