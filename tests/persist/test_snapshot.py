"""Snapshots: exact, whole or absent, and never the last good one lost."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from robustrl import events
from robustrl.errors import SnapshotError
from robustrl.persist.snapshot import Frozen, Snapshotter, restore_into

torch = pytest.importorskip("torch")


def trainer() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "optim": optim,
        "schedule": torch.optim.lr_scheduler.StepLR(optim, 2),
        "sampler": torch.Generator().manual_seed(7),
        "ema": torch.zeros(3, dtype=torch.bfloat16),
        "seen": {"prompts": 12, "note": "plain"},
    }


def train(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(5, 8) + random.random() + torch.rand(1, generator=state["sampler"])
        state["model"](x).square().mean().backward()
        state["optim"].step()
        state["optim"].zero_grad()
        state["schedule"].step()
        state["ema"] += 0.5


def bits(state: dict[str, Any]) -> bytes:
    out = b""
    for value in state["model"].state_dict().values():
        out += value.numpy().tobytes()
    for one in state["optim"].state_dict()["state"].values():
        out += b"".join(one[key].numpy().tobytes() for key in sorted(one))
    return out + state["ema"].view(torch.int16).numpy().tobytes()


def saved(folder: Path, *steps: int, keep: int = 3) -> Snapshotter:
    shot = Snapshotter(folder, keep)
    for step in steps:
        shot.save(shot.freeze({"x": torch.full((4,), float(step))}), step, {"version": f"1.{step}"})
    return shot


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_trainer_goes_on_bit_for_bit_from_a_loaded_point(tmp_path: Path) -> None:
    said: list[Any] = []
    shot = Snapshotter(tmp_path, 2, said.append)
    state = trainer()
    train(state, 3)
    shot.save(shot.freeze(state), 3, {"version": "1.3"})
    train(state, 3)
    expected = bits(state)

    again = trainer()
    train(again, 1)  # it holds other state, and the generators are elsewhere
    point = Snapshotter(tmp_path).newest()
    assert point is not None and (point.step, point.extra) == (3, {"version": "1.3"})
    plain = restore_into(again, shot.load(point))
    assert plain == {"seen": {"prompts": 12, "note": "plain"}}
    train(again, 3)
    assert bits(again) == expected
    assert again["schedule"].state_dict() == state["schedule"].state_dict()
    assert [(one.step, one.bytes) for one in said] == [(3, point.bytes)]


def test_frozen_state_is_not_touched_by_later_steps_and_restores_from_memory(tmp_path: Path) -> None:
    state = trainer()
    train(state, 2)
    before = bits(state)
    frozen = Snapshotter(tmp_path).freeze(state)
    train(state, 2)
    restore_into(state, frozen)
    assert bits(state) == before


def test_numpy_and_python_generators_are_part_of_it(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    shot = Snapshotter(tmp_path)
    point = shot.save(shot.freeze({}), 1)
    expected = random.random(), numpy.random.rand(), numpy.random.randn(), torch.rand(1).item()
    restore_into({}, shot.load(point))
    assert (random.random(), numpy.random.rand(), numpy.random.randn(), torch.rand(1).item()) == expected


def test_what_cannot_be_kept_without_pickling_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"extra\['hook'\]"):
        Snapshotter(tmp_path).freeze({"extra": {"hook": print}})


def test_other_state_than_the_trainers_is_refused(tmp_path: Path) -> None:
    shot = saved(tmp_path, 1)
    point = shot.newest()
    assert point is not None
    with pytest.raises(SnapshotError, match="'y'"):
        restore_into({"y": torch.zeros(4)}, shot.load(point))
    with pytest.raises(SnapshotError, match="shape"):
        restore_into({"x": torch.zeros(5)}, shot.load(point))


def test_retention_counts_numbers_and_keeps_the_newest(tmp_path: Path) -> None:
    shot = saved(tmp_path, 9, 10, 11, keep=2)
    assert names(tmp_path) == ["NEWEST", "point-10.0", "point-11.0"]
    point = shot.newest()
    assert point is not None and point.step == 11
    assert (tmp_path / "NEWEST").read_text() == "point-11.0\n"


def test_the_second_pass_through_a_step_is_a_point_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path, 9, 10)
    shot = saved(tmp_path, 10)
    point = shot.newest()
    assert point is not None and point.path.endswith("point-10.1")


@pytest.mark.parametrize("damage", ["flip", "cut", "state", "manifest", "point"])
def test_a_corrupt_point_falls_back_to_the_previous_one_and_says_so(tmp_path: Path, damage: str) -> None:
    saved(tmp_path, 1, 2)
    state, manifest = tmp_path / "point-2.0" / "state.pt", tmp_path / "point-2.0" / "manifest.json"
    match damage:
        case "flip":
            data = bytearray(state.read_bytes())
            data[len(data) // 2] ^= 1
            state.write_bytes(data)
        case "cut":
            state.write_bytes(state.read_bytes()[:-7])
        case "state":
            state.unlink()
        case "manifest":
            manifest.write_bytes(manifest.read_bytes()[:20])
        case "point":
            for path in (state, manifest):
                path.unlink()
            state.parent.rmdir()
    said: list[Any] = []
    shot = Snapshotter(tmp_path, 1, said.append)
    point = shot.newest()
    assert point is not None and point.step == 1
    assert shot.newest() == point
    assert [type(one) for one in said] == [events.Alarm] and "point-2.0" in said[0].text
    assert shot.load(point).state["x"].tolist() == [1.0] * 4


def test_the_newest_verified_point_survives_retention_among_corrupt_ones(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    for step in (2, 3):
        (tmp_path / f"point-{step}.0" / "state.pt").write_bytes(b"rubbish")
    shot = Snapshotter(tmp_path, 1)
    shot._prune()
    assert "point-1.0" in names(tmp_path)
    shot.save(shot.freeze({"x": torch.ones(4)}), 2)
    point = shot.newest()
    assert point is not None and point.path.endswith("point-2.1")


def test_a_point_that_would_run_code_is_not_loaded(tmp_path: Path) -> None:
    shot = saved(tmp_path, 1)
    frozen = Frozen({"x": print}, {}, 0.0)
    point = shot.save(frozen, 2)
    with pytest.raises(SnapshotError, match="not plain"):
        shot.load(point)


def test_a_full_disk_is_said_and_earlier_points_are_intact(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the write fails in the middle, as with ENOSPC."""
    shot = saved(tmp_path, 1)
    frozen = shot.freeze({"x": torch.zeros(1 << 16)})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        with pytest.raises(SnapshotError, match="intact") as caught:
            shot.save(frozen, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.EFBIG
    assert names(tmp_path) == ["NEWEST", "point-1.0"]
    assert shot.newest() is not None
    assert shot.save(frozen, 2).step == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_really_full_disk_leaves_the_previous_point(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        shot = Snapshotter(disk)
        shot.save(shot.freeze({"x": torch.zeros(50_000)}), 1)
        with pytest.raises(SnapshotError, match="No space left"):
            shot.save(shot.freeze({"x": torch.zeros(150_000)}), 2)
        point = shot.newest()
        assert point is not None and point.step == 1
        assert names(disk) == ["NEWEST", "point-1.0"]
    finally:
        subprocess.run(["umount", disk], check=True)


KILLED = """
    import os, pathlib, signal, sys
    import torch
    from robustrl.persist.snapshot import Snapshotter

    calls = fatal = 0

    def deadly(module, name):
        real = getattr(module, name)
        def wrapper(*args, **kwargs):
            global calls
            calls += 1
            if calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(module, name, wrapper)

    def one(number):
        global fatal, calls
        folder = pathlib.Path(sys.argv[1]) / str(number)
        shot = Snapshotter(folder, 1)
        shot.save(shot.freeze({"x": torch.full((4,), 1.0)}), 1)
        calls, fatal = 0, number
        shot.save(shot.freeze({"x": torch.full((4,), 2.0)}), 2)

    for module, name in ((os, "fsync"), (os, "unlink"), (os, "rmdir"), (pathlib.Path, "open"), (pathlib.Path, "mkdir"),
                         (pathlib.Path, "rename"), (pathlib.Path, "replace")):
        deadly(module, name)
    one(0)
    for number in range(1, calls + 1):
        pid = os.fork()  # one import of torch serves all
        if pid == 0:
            one(number)
            os._exit(1)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != -signal.SIGKILL:
            sys.exit(f"save {number} was not killed")
    print(calls)
"""


def test_a_save_that_is_killed_at_any_stage_leaves_a_whole_point(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    stages = int(done.stdout)
    assert stages >= 12
    seen = set()
    for fatal in range(1, stages + 1):
        folder = tmp_path / str(fatal)
        shot = Snapshotter(folder, 1)
        point = shot.newest()
        assert point is not None
        assert shot.load(point).state["x"].tolist() == [float(point.step)] * 4
        pointer = (folder / "NEWEST").read_text().strip()
        assert int(pointer.removeprefix("point-").split(".")[0]) <= point.step  # never ahead of the data
        shot.save(shot.freeze({"x": torch.full((4,), 3.0)}), 3)
        assert names(folder) == ["NEWEST", "point-3.0"]
        seen.add(point.step)
    assert seen == {1, 2}
