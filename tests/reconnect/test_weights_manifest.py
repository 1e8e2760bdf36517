"""Manifests: what they cover, and that nothing from a wire is believed."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robustrl.config import ReconnectConfig
from robustrl.errors import ConfigError, CorruptChunkError, ProtocolError, TransportError, WeightError
from robustrl.reconnect import transports, weights_digest
from robustrl.reconnect.content import freeze, load, verify
from robustrl.reconnect.manifest import ALIGNMENT, MAX_BYTES, Manifest, Piece, TensorSpec, check_ranges, plan_ranges
from robustrl.reconnect.transports.base import SocketStream
from robustrl.roles import Identity
from robustrl.wire import Secret, frames, handshake

TENSORS = {"a": torch.arange(1000.0), "b": torch.ones(3, 5, dtype=torch.bfloat16), "c": torch.empty(0)}


def test_equal_weights_have_an_equal_digest_however_they_lie_in_memory() -> None:
    tied = torch.randn(64, 64)
    digest = weights_digest({"x": tied, "y": tied}, 1024)
    assert weights_digest({"y": tied.clone(), "x": tied.t().contiguous().t()}, 1024) == digest
    assert weights_digest({"x": tied, "z": tied}, 1024) != digest
    assert weights_digest({"x": tied, "y": tied.view(-1)}, 1024) != digest
    assert weights_digest({"x": tied, "y": tied.view(torch.int32)}, 1024) != digest
    changed = tied.clone()
    changed[63, 63] += 1
    assert weights_digest({"x": tied, "y": changed}, 1024) != digest


@pytest.mark.parametrize("elements", [5, 3 << 20])
def test_large_and_small_tensors_arrive_as_they_are_seen_not_as_they_lie(elements: int) -> None:
    flat = torch.randn(elements)
    tensors = {
        "plain": flat,
        "odd": flat[1:],
        "every other": flat[::2],
        "conjugate": torch.complex(flat, flat + 1).conj(),
        "turned": flat[: elements // 3 * 3].view(3, -1).t(),
        "row": flat.expand(1, elements),
    }
    for chunk in (1 << 20, 1_000_003):  # which no size of an element divides
        content = freeze(tensors, chunk)
        target = {name: torch.zeros_like(tensor).resolve_conj() for name, tensor in tensors.items()}
        target["plain"] = torch.zeros(2, elements)[1]
        target["odd"] = torch.zeros(elements - 1, 2)[:, 0]
        assert load(content, target) == content.digest
        assert all(torch.equal(target[name], tensor) for name, tensor in tensors.items())


def test_tied_tensors_are_kept_once() -> None:
    tied = torch.randn(1 << 12)
    assert freeze({"x": tied, "y": tied}, 1024).size == freeze({"x": tied}, 1024).size


def test_what_cannot_be_published_is_named() -> None:
    with pytest.raises(WeightError, match="'s'"):
        freeze({"a": torch.ones(1), "s": torch.eye(3).to_sparse()}, 1024)


def test_a_flipped_bit_is_found_in_whichever_chunk_it_is() -> None:
    content = freeze(TENSORS, 256)
    pieces = content.manifest.pieces()
    assert sum(piece.length for piece in pieces) == 4000 + 30
    for piece in pieces:
        verify(piece, content.buffer.view)
        content.buffer.view[piece.start + piece.length - 1] ^= 4
        with pytest.raises(CorruptChunkError, match=f"'{piece.tensor}'"):
            verify(piece, content.buffer.view)
        content.buffer.view[piece.start + piece.length - 1] ^= 4
    target = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    assert load(content, target) == weights_digest(target, 256) == content.digest


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float8_e5m2, torch.int64])


@settings(max_examples=60, deadline=None)
@given(
    layout=st.dictionaries(st.text(min_size=1, max_size=9), st.tuples(SHAPES, DTYPES), max_size=6),
    chunk=st.integers(1, 200),
    limit=st.integers(1, 500),
)
def test_any_model_survives_the_wire_and_its_ranges_cover_it(
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]], chunk: int, limit: int
) -> None:
    tensors = {name: torch.ones(shape).to(dtype) for name, (shape, dtype) in layout.items()}
    content = freeze(tensors, chunk)
    manifest = Manifest.decode(content.encoded)
    assert manifest == content.manifest
    assert manifest.digest() == content.digest
    pieces = manifest.pieces()
    groups = plan_ranges(pieces, limit)
    assert [piece for _, group in groups for piece in group] == pieces
    for wanted, group in groups:
        assert wanted.length <= max(limit, chunk)
        for piece in group:
            verify(piece, content.buffer.view)
            assert wanted.start <= piece.start
            assert piece.start + piece.length <= wanted.start + wanted.length
    check_ranges([wanted for wanted, _ in groups], content.size)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_manifest_that_was_tampered_with_is_refused_or_still_well_formed(data: st.DataObject) -> None:
    encoded = bytearray(freeze(TENSORS, 512).encoded)
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        manifest = Manifest.decode(bytes(encoded))
    except ProtocolError:
        return
    end = 0
    for piece in manifest.pieces():
        assert end <= piece.start < manifest.size <= MAX_BYTES
        end = piece.start + piece.length
    assert end <= manifest.size


@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    try:
        manifest = Manifest.decode(data)
    except ProtocolError:
        return
    assert manifest.size <= MAX_BYTES


def spec(**changes: object) -> TensorSpec:
    return msgspec.structs.replace(TensorSpec("a", "float32", (4,), 0, bytes(16)), **changes)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ([spec(dtype="object")], "no dtype"),
        ([spec(shape=(1 << 40, 1 << 40))], "more than"),
        ([spec(chunks=b"")], "chunk digests"),
        ([spec(offset=64)], "0 is next"),
        ([spec(name="b"), spec(name="a")], "sorted"),
        ([spec(), spec(name="b", shape=(2,))], "overlaps"),
        ([spec(), spec(name="b", offset=ALIGNMENT * 2)], "64 is next"),
        ([spec(shape=(0,), chunks=b"", offset=64)], "empty"),
        ([spec(shape=(-1,))], "shape|int"),
        ([spec(name="")], "length"),
    ],
)
def test_a_manifest_that_nobody_could_have_made_is_refused(tensors: list[TensorSpec], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        Manifest.decode(msgspec.msgpack.encode((1 << 20, tensors)))


def test_ranges_outside_the_version_are_refused() -> None:
    for start, length in ((-1, 5), (0, 0), (0, 11), (10, 1), (1 << 70, 1)):
        with pytest.raises(ProtocolError):
            check_ranges([(start, length)], 10)
    assert plan_ranges([Piece(0, 8, b"", "a"), Piece(64, 8, b"", "b"), Piece(512, 8, b"", "c")], 100) == [
        ((0, 72), [Piece(0, 8, b"", "a"), Piece(64, 8, b"", "b")]),
        ((512, 8), [Piece(512, 8, b"", "c")]),
    ]


def test_the_transport_of_a_pair_is_chosen_with_a_reason() -> None:
    here, all_three = "boot/1", ["shm", "ucx", "tcp"]
    theirs = {"shm": "boot/1/name", "ucx": "h:1", "tcp": "h:2"}
    assert transports.choose(all_three, theirs, here)[0] == ("shm", "same host")
    elsewhere = transports.choose(all_three, theirs | {"shm": "boot/2/name"}, here)
    assert [choice.transport for choice in elsewhere] == ["ucx", "tcp"]
    assert elsewhere[0].why == "the peer is on another host; both have ucx"
    assert transports.choose(["tcp"], theirs, here) == [("tcp", "configured")]
    with pytest.raises(TransportError, match="the peer has no tcp"):
        transports.choose(["tcp"], {"ucx": "h:1"}, here)


NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1)
MESSAGES = st.one_of(
    st.dictionaries(
        st.sampled_from(["open", "read", "put", "tag", "ucx", "metadata", "take"]),
        st.one_of(st.none(), NUMBERS, st.text(), st.lists(st.one_of(NUMBERS, st.lists(NUMBERS)))),
    ).map(frames.encode),
    st.binary(max_size=64),
)


@pytest.mark.parametrize("transport", ["tcp", "ucx", "shm", "nixl"])
@settings(max_examples=15, deadline=None)
@given(said=st.lists(MESSAGES, min_size=1, max_size=4))
def test_a_source_survives_whatever_a_puller_says(transport: str, said: list[bytes]) -> None:
    if transport == "ucx" and not transports.ucx_installed():
        pytest.skip("needs ucxx")
    if transport == "nixl" and not transports.nixl_installed():
        pytest.skip("needs NIXL (robustrl[nixl])")
    secret, who = Secret(bytes(32)), Identity.parse("rollout/0#1")
    content = freeze(TENSORS, 256)

    async def main() -> None:
        config = ReconnectConfig(transport=transport, timeout_s=1.0)  # type: ignore[arg-type]
        [server] = transports.make(config, who, secret, "127.0.0.1").values()
        endpoint = await server.serve(lambda digest: content if digest == content.digest else None)
        assert isinstance(server, transports.base.SocketTransport)
        try:
            sock, address = server.dial(endpoint)
            stream = SocketStream(sock)
            await asyncio.get_running_loop().sock_connect(sock, address)
            await handshake.offer(stream, stream, secret, who)
            try:
                for data in said:
                    stream.write(data)
                await stream.drain()
            except OSError:
                pass
            stream.close()
            async with asyncio.timeout(5):
                session = await server.connect(endpoint)
                assert Manifest.decode(await session.open(content.digest)) == content.manifest
                await session.close()
        finally:
            await server.close()

    asyncio.run(main())


def test_endpoints_that_are_none_are_refused() -> None:
    for transport, endpoint in (("tcp", "nonsense"), ("shm", "elsewhere/name"), ("shm", "")):
        config = ReconnectConfig(transport=transport)  # type: ignore[arg-type]
        [made] = transports.make(config, Identity.parse("r#1"), Secret(bytes(32)), "127.0.0.1").values()
        with pytest.raises((TransportError, ConfigError)):
            asyncio.run(made.connect(endpoint))
