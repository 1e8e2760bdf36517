"""Our flags in a framework's command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robustrl.attach import Session, extract
from robustrl.attach.flags import known_names
from robustrl.config import RobustConfig
from robustrl.errors import AttachError, ConfigError


def test_both_spellings_are_taken_out_and_the_rest_stays_as_it_was() -> None:
    flags = extract(
        [
            "data.x=1",
            "robustrl.restart.budget=5",
            "+robustrl.detect.silence_s=2.5",
            "++robustrl.reconnect.transport=tcp",
            "--robustrl.persist.staleness",
            "2",
            "--robustrl.restart.grace-s=7",
            "--robustrl.enable",
            "--lr",
            "1e-3",
            'robustrl.detect.limits={"trainer.train": 90}',
            "+trainer.logger=['console']",
        ]
    )
    assert flags.rest == ("data.x=1", "--lr", "1e-3", "+trainer.logger=['console']")
    assert flags.enable
    assert flags.config.restart.budget == 5
    assert flags.config.detect.silence_s == 2.5
    assert flags.config.reconnect.transport == "tcp"
    assert flags.config.persist.staleness == 2
    assert flags.config.restart.grace_s == 7
    assert flags.config.detect.limits == {"trainer.train": 90}


def test_without_flags_everything_is_as_it_ships() -> None:
    assert extract(["a=b"]) == extract([]).__class__(RobustConfig(), ("a=b",))


def test_the_last_word_counts_and_a_file_comes_first(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[restart]\nbudget = 3\ngrace_s = 9.0\n")
    flags = extract(["robustrl.restart.budget=4", f"robustrl.config={file}", "robustrl.restart.budget=6"])
    assert (flags.config.restart.budget, flags.config.restart.grace_s) == (6, 9.0)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["robustrl.restart.buget=5"], "Did you mean robustrl.restart.budget?"),
        (["--robustrl.enabel"], "no value"),
        (["--robustrl.enabel=true"], "Did you mean robustrl.enable?"),
        (["robustrl.zzz=1"], "there is no flag robustrl.zzz"),
        (["robustrl.restart.budget"], "has no value"),
        (["--robustrl.restart.budget", "--lr"], "has no value"),
        (["robustrl.restart.budget=many"], "budget"),
        (["robustrl.enable=maybe"], "must be true or false"),
        (["robustrl.detect.silence_s=1", "robustrl.detect.heartbeat_s=1"], "at least 3 times"),
        (["robustrl.config=/nowhere.toml"], "cannot read"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        extract(argv)


def test_off_and_none() -> None:
    flags = extract(["robustrl.enable=False", "robustrl.reconnect.staging_bytes=None", "robustrl.run=/tmp/here"])
    assert not flags.enable
    assert flags.config.reconnect.staging_bytes is None
    assert flags.run == "/tmp/here"


@given(st.lists(st.text(max_size=20).filter(lambda word: "robustrl." not in word)))
def test_a_foreign_command_line_is_left_alone(words: list[str]) -> None:
    assert extract(words).rest == tuple(words)


def test_each_known_name_is_a_setting() -> None:
    names = known_names()
    assert {"enable", "run", "config", "restart.budget", "detect.limits"} <= set(names)
    assert len(names) == len(set(names))


def test_a_session_travels_in_the_environment_without_its_secret(tmp_path: Path) -> None:
    session = Session("verl", str(tmp_path), extract(["robustrl.restart.budget=5"]).config)
    env = session.environment()
    assert Session.current(env) == session
    assert Session.current({}) is None
    assert env["ROBUSTRL_RUN_DIR"] == str(tmp_path)
    with pytest.raises(ConfigError, match="secret"):
        session.secret()
    with pytest.raises(AttachError, match="ROBUSTRL_ATTACH"):
        Session.current({"ROBUSTRL_ATTACH": "{"})
