"""Sharded models: every trainer rank publishes its part, every rollout rank pulls what its layout needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_rig import Driven, RemoteFailure, Rig, fingerprint

from robustrl.config import ReconnectConfig
from robustrl.errors import ProtocolError, WeightError, WeightMismatchError
from robustrl.reconnect import Directory, Offer, Slice, transports
from robustrl.reconnect.content import freeze, load
from robustrl.reconnect.manifest import Manifest, check_ranges, cover
from robustrl.reconnect.sharding import needed
from robustrl.roles import Identity, Version

RANKS = 2
NEEDS_NIXL = pytest.mark.skipif(not transports.nixl_installed(), reason="needs NIXL (robustrl[nixl])")
TRANSPORTS = [
    "tcp",
    pytest.param("ucx", marks=pytest.mark.skipif(not importlib.util.find_spec("ucxx"), reason="needs ucxx")),
    "shm",
    pytest.param("nixl", marks=NEEDS_NIXL),
]


def model(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "up": torch.randn(301, 512, generator=generator),
        "down": torch.randn(128, 768, generator=generator).to(torch.bfloat16),
        "embed": torch.randn(4096, 64, generator=generator),
        "wide": torch.randn(8, 1 << 16, generator=generator),  # rows of many chunks
        "norm": torch.randn(77, generator=generator),
        "step": torch.tensor(seed),
    }


def rows(rank: int, count: int = RANKS) -> dict[str, Slice]:
    """FSDP: each rank has a block of rows of everything."""
    return {name: Slice.split(tuple(t.shape), 0, rank, count) for name, t in model().items() if t.dim()}


def columns(rank: int, count: int = RANKS) -> dict[str, Slice]:
    """Tensor parallelism: columns of some matrices, rows of others, all of the rest."""
    whole = {name: tuple(t.shape) for name, t in model().items()}
    return {
        "up": Slice.split(whole["up"], 1, rank, count),
        "down": Slice.split(whole["down"], 1, rank, count),
        "embed": Slice.split(whole["embed"], 0, rank, count),
        "wide": Slice.split(whole["wide"], 1, rank, count),
        "norm": Slice.all(whole["norm"]),
    }


def cut(tensors: dict[str, torch.Tensor], slices: dict[str, Slice]) -> dict[str, torch.Tensor]:
    return {
        name: tensor[slices[name].within(Slice.all(tuple(tensor.shape)))].clone() if name in slices else tensor.clone()
        for name, tensor in tensors.items()
    }


class Rank(Driven):
    def options(self) -> dict[str, Any]:
        if self.identity.member.role == "rollout":
            return {"layout": columns(self.identity.member.index % RANKS)}
        return {}

    async def publish_part(self, version: str, seed: int) -> str:
        rank = self.identity.member.index
        done = await self.weights.publish(
            cut(model(seed), rows(rank)), Version.parse(version), slices=rows(rank), part=rank, parts=RANKS
        )
        return str(done.digest)

    async def load(self, seed: int) -> Any:
        target = {
            name: torch.zeros_like(tensor)
            for name, tensor in cut(model(seed), columns(self.identity.member.index % RANKS)).items()
        }
        return self.weights.apply(self.held, target), fingerprint(target)


@pytest.fixture(params=TRANSPORTS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(ReconnectConfig(transport=request.param, chunk_bytes=16 << 10, timeout_s=2.0))
    yield rig
    rig.close()


def test_row_shards_become_column_shards_and_relays_serve_their_own_kind(rig: Rig) -> None:
    trainers = [rig.member(f"trainer/{rank}#1", kind=Rank) for rank in range(RANKS)]
    rollouts = [rig.member(f"rollout/{rank}#1", kind=Rank) for rank in range(RANKS)]
    trainers[0].ask("publish_part", version="1.1", seed=1)
    assert rollouts[0].ask("pull", timeout=0.3) is None  # a rank is missing
    trainers[1].ask("publish_part", version="1.1", seed=1)
    for rank, rollout in enumerate(rollouts):
        version, digest = rollout.ask("pull")
        assert version == "1.1"
        loaded, got = rollout.ask("load", seed=1)
        assert loaded == digest
        assert got == fingerprint(cut(model(1), columns(rank)))
    if rig.config.transport != "shm":
        total = sum(tensor.nbytes for tensor in model().values())
        assert rollouts[0].ask("stats")["pulled"] < 0.75 * total
    for step in (2, 3):
        for trainer in trainers:
            trainer.ask("publish_part", version=f"1.{step}", seed=step)
        for rank, rollout in enumerate(rollouts):
            assert rollout.ask("pull", newer_than=f"1.{step - 1}")[0] == f"1.{step}"
            assert rollout.ask("load", seed=step)[1] == fingerprint(cut(model(step), columns(rank)))
    served = [trainer.ask("stats")["served"] for trainer in trainers]
    late = rig.member("rollout/3#1", kind=Rank)  # of the same kind as rollout/1
    assert late.ask("pull")[0] == "1.3"
    assert late.ask("load", seed=3)[1] == fingerprint(cut(model(3), columns(1)))
    assert late.ask("stats")["sources"] == [["rollout/1#1"]]
    assert [trainer.ask("stats")["served"] for trainer in trainers] == served
    for trainer in trainers:
        trainer.kill()
    other = rig.member("rollout/5#1", kind=Rank)
    assert other.ask("pull")[0] == "1.3"
    assert other.ask("load", seed=3)[1] == fingerprint(cut(model(3), columns(1)))


def test_ranks_that_do_not_agree_are_refused(rig: Rig) -> None:
    if rig.config.transport != "tcp":
        pytest.skip("the directory's matter, whatever the transport")
    trainers = [rig.member(f"trainer/{rank}#1", kind=Rank) for rank in range(RANKS)]
    trainers[0].ask("publish_part", version="1.1", seed=1)
    trainers[1].ask("publish", version="1.2", seed=1)
    with pytest.raises(RemoteFailure, match=r"WeightError.*not above the newest"):
        trainers[1].ask("publish_part", version="1.1", seed=1)
    with pytest.raises(RemoteFailure, match=r"WeightError.*part 0 of 1"):
        rig.member("trainer/2#1").ask("publish", version="1.1", seed=1)


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Slice], Slice]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dim, count = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
    start = tuple(draw(st.integers(0, length - 1)) for length in shape)
    size = tuple(draw(st.integers(0, length - at)) for length, at in zip(shape, start, strict=True))
    return shape, [Slice.split(shape, dim, index, count) for index in range(count)], Slice(shape, start, size)


@settings(max_examples=150, deadline=None)
@given(splits(), st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
def test_any_slice_can_be_had_from_any_split_with_the_chunks_that_are_said_to_be_needed(
    split: tuple[tuple[int, ...], list[Slice], Slice], chunk: int, dtype: torch.dtype
) -> None:
    shape, parts, wanted = split
    whole = torch.arange(int(torch.tensor(shape).prod())).reshape(shape).to(dtype)
    box = Slice.all(shape)
    contents = []
    for part in parts:
        content = freeze({"w": whole[part.within(box)], "x": torch.ones(3)}, chunk, slices={"w": part})
        manifest = Manifest.decode(content.encoded)
        pieces = needed(manifest, {"w": wanted, "x": Slice((3,), (0,), (0,))})
        present = cover(pieces)
        for piece in pieces:
            check_ranges([(piece.start, piece.length)], manifest.size, present)
        kept = bytes(content.buffer.view)
        content.buffer.view[:] = bytes([255]) * len(kept)
        for piece in pieces:
            content.buffer.view[piece.start : piece.start + piece.length] = kept[piece.start :][: piece.length]
        contents.append(content)
    layout = {"w": wanted, "x": Slice((3,), (0,), (0,))}
    target = {"w": torch.zeros(wanted.size, dtype=dtype), "x": torch.zeros(0)}
    load(contents, target, layout)
    assert torch.equal(target["w"], whole[wanted.within(box)])


def test_a_relay_of_some_chunks_serves_no_others() -> None:
    content = freeze({"a": torch.zeros(100)}, 100)
    present = cover(content.manifest.pieces()[1:3])
    assert check_ranges([(100, 200)], 400, present) == [(100, 200)]
    for start, length in ((0, 100), (100, 201), (299, 2), (300, 100)):
        with pytest.raises(ProtocolError, match="other parts"):
            check_ranges([(start, length)], 400, present)


def test_slices_that_leave_something_open_are_named() -> None:
    part = freeze({"w": torch.zeros(2, 4)}, 64, slices={"w": Slice((4, 4), (0, 0), (2, 4))})
    with pytest.raises(WeightMismatchError, match="'w' was not published whole: the slices leave 8 of 16"):
        load([part], {"w": torch.zeros(4, 4)})
    with pytest.raises(WeightError, match="another shape"):
        needed(part.manifest, {"w": Slice((8, 4), (0, 0), (2, 4))})
    with pytest.raises(WeightError, match="no slice"):
        Slice((4,), (2,), (3,))
    with pytest.raises(WeightError, match="'w' is not the slice"):
        freeze({"w": torch.zeros(3, 4)}, 64, slices={"w": Slice((4, 4), (0, 0), (2, 4))})


def test_a_version_is_there_when_all_its_parts_are() -> None:
    directory = Directory()
    version, first, second, puller = Version(1, 1), *(Identity.parse(f"t/{index}#1") for index in range(3))
    directory.announce(first, {}, [Offer(version, "a", 5, 0, 2)], origin=True, publish=version)
    assert directory.newest() is None
    directory.announce(second, {}, [Offer(version, "b", 7, 1, 2)], origin=True, publish=version)
    found = directory.newest()
    assert found is not None
    assert (found.bytes, found.parts, found.shares) == (12, 2, ("a", "b"))
    given = directory.assign(puller, version, 0.0, 1)
    assert given is not None
    assert (given.source, given.digest) == (second, "b")
    some = [Offer(version, digest, 5 + 2 * part, part, 2, "columns") for part, digest in enumerate("ab")]
    directory.announce(puller, {}, some, origin=False)
    assert directory.relays(version) == 1
    directory.retire(first)
    assert directory.newest() is None
    assert directory.newest(layout="columns") == found
    given = directory.assign(first, version, 0.0, 1, "columns")
    assert given is not None
    assert given.source == puller
