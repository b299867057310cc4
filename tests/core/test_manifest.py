"""Rank files and manifests: what is written is read, and whatever else lies there is refused with clear words."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.core.errors import DataError
from trainwarden.core.manifest import MANIFEST, Manifest, read_manifest, read_rank_file, write_manifest, write_rank_file
from trainwarden.core.sealed import is_draft, is_safe, measure, read_sealed, write_sealed

DIGEST = "sha256:" + "0" * 64
GOOD = Manifest(
    name="step-40-4294967296",
    job="train-3",
    epoch=1 << 32,
    step=40,
    t_ns=10**18,
    loss=2.5,
    grad_norm=None,
    data_position={"next_batch": 41},
    topology=[{"slot": "n1:0"}],
    rank_steps={0: 40, 10: 40, 2: 40},
    files={"__0_0.distcp": (12, DIGEST), "sub/extra.json": (0, DIGEST)},
)


def seal(body: str) -> str:
    """Sealed as the product does it, whatever it says."""
    return f'{body[:-1]},"seal":"sha256:{hashlib.sha256(body.encode()).hexdigest()}"}}\n'


def sealed_with(**changes: object) -> str:
    """The good manifest, some keys of it changed; None takes a key out."""
    told: dict[str, Any] = json.loads(json.dumps({**{k: getattr(GOOD, k) for k in GOOD.__slots__}, "form": 1}))
    told |= changes
    return seal(json.dumps({key: value for key, value in told.items() if value != "absent"}))


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    write_manifest(tmp_path, GOOD)
    assert read_manifest(tmp_path) == GOOD
    assert os.listdir(tmp_path) == [MANIFEST]


def test_a_rank_says_what_dcp_wrote_as_it_and_what_it_is_told(tmp_path: Path) -> None:
    for name in (".metadata", "__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__10_0.distcp", "notes.txt"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").write_bytes(b"abc")
    told = write_rank_file(tmp_path, rank=0, step=40, files=[tmp_path / "notes.txt", "sub/x"], data_position=[1, "a"])
    assert read_rank_file(tmp_path, 0) == told
    assert sorted(told.files) == [".metadata", "__0_0.distcp", "__0_1.distcp", "notes.txt", "sub/x"]
    assert told.files["sub/x"] == (3, f"sha256:{hashlib.sha256(b'abc').hexdigest()}")
    assert sorted(write_rank_file(tmp_path, rank=1, step=40).files) == ["__1_0.distcp"]


def test_a_rank_that_wrote_nothing_says_so(tmp_path: Path) -> None:
    assert write_rank_file(tmp_path, rank=3, step=40).files == {}


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "sub/../../x"])
def test_a_rank_does_not_speak_for_files_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path.parent / "x").write_bytes(b"x")
    with pytest.raises(DataError, match="expected paths below the folder"):
        write_rank_file(tmp_path, rank=0, step=40, files=[name])
    assert not [*tmp_path.glob("rank-*")]


@pytest.mark.parametrize("position", [float("nan"), {1, 2}, b"x", {"a": float("inf")}], ids=repr)
def test_a_data_position_that_is_no_json_is_refused(tmp_path: Path, position: object) -> None:
    with pytest.raises(DataError, match=r"rank-0.json: cannot be told in JSON"):
        write_rank_file(tmp_path, rank=0, step=40, data_position=position)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "torn: expected a seal", id="empty"),
        pytest.param("garbage \x00", "torn: expected a seal", id="garbage"),
        pytest.param(sealed_with()[:-40], "torn: expected a seal", id="cut off"),
        pytest.param(sealed_with().replace("2.5", "2.6"), "altered: its seal is that of other bytes", id="altered"),
        pytest.param(seal('"a":1}'), "not JSON", id="not an object"),
        pytest.param(seal('{"form":1e999}'), "not finite: 1e999", id="an infinite number"),
        pytest.param(seal('{"form":NaN}'), "not finite: NaN", id="a NaN"),
        pytest.param(seal('{"form":' + "9" * 5000 + "}"), "a number beyond 64 bits: 9999", id="a huge number"),
        pytest.param(seal('{"a":' + "[" * 100_000 + "}"), "not JSON", id="nested without end"),
        pytest.param(sealed_with(form=2), "form: expected 1 (a newer trainwarden wrote it", id="a newer form"),
        pytest.param(sealed_with(form="absent"), "form: missing", id="no form"),
        pytest.param(sealed_with(job="absent"), "job: missing", id="a key is missing"),
        pytest.param(sealed_with(job=3), "job: expected text, got 3", id="text is a number"),
        pytest.param(sealed_with(step="40"), "step: expected a whole number from 0 to 2147483647, got '40'", id="text"),
        pytest.param(sealed_with(step=True), "step: expected a whole number", id="true is no number"),
        pytest.param(sealed_with(step=1 << 31), "step: expected a whole number", id="a step beyond a ring's"),
        pytest.param(sealed_with(epoch=-1), "epoch: expected a whole number", id="a negative epoch"),
        pytest.param(sealed_with(loss="2"), "loss: expected a finite number or null, got '2'", id="a loss in text"),
        pytest.param(sealed_with(rank_steps=[40]), "rank_steps: expected a table", id="rank steps in a list"),
        pytest.param(sealed_with(rank_steps={"01": 40}), "rank_steps: expected ranks as keys, got '01'", id="rank 01"),
        pytest.param(sealed_with(rank_steps={"9999999": 40}), "rank_steps: expected ranks as keys", id="a huge rank"),
        pytest.param(sealed_with(rank_steps={"0": -1}), "rank_steps.0: expected a whole number", id="a negative step"),
        pytest.param(sealed_with(files={"../x": [1, DIGEST]}), "files: expected names of files below", id="upwards"),
        pytest.param(sealed_with(files={"/x": [1, DIGEST]}), "files: expected names of files below", id="absolute"),
        pytest.param(sealed_with(files={"a\x1b": [1, DIGEST]}), r"got 'a\x1b'", id="a terminal's escape"),
        pytest.param(sealed_with(files={"x": [-1, DIGEST]}), "files.x: expected [bytes, ", id="a negative length"),
        pytest.param(sealed_with(files={"x": [1, "md5:0"]}), "files.x: expected [bytes, ", id="another digest"),
        pytest.param(sealed_with(files={"x": [1]}), "files.x: expected [bytes, ", id="no digest"),
        pytest.param(sealed_with(files={"x": None}), "files.x: expected [bytes, ", id="no file"),
    ],
)
def test_what_is_no_manifest_is_refused_by_file_key_and_value(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(DataError) as refused:
        read_manifest(tmp_path)
    assert str(refused.value).startswith(str(tmp_path / MANIFEST)), refused.value
    assert words in str(refused.value)


def test_keys_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(sealed_with(newer=1))
    assert read_manifest(tmp_path) == GOOD


def test_a_rank_file_of_another_rank_is_refused(tmp_path: Path) -> None:
    write_rank_file(tmp_path, rank=1, step=40)
    (tmp_path / "rank-1.json").rename(tmp_path / "rank-0.json")
    with pytest.raises(DataError, match=r"rank-0.json: rank: expected 0, as the file's name says, got 1"):
        read_rank_file(tmp_path, 0)


@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_do_anything_but_be_refused(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, sealed: bool
) -> None:
    folder = tmp_path_factory.mktemp("any")
    end = f',"seal":"sha256:{hashlib.sha256(raw + b"}").hexdigest()}"}}\n'.encode()
    (folder / MANIFEST).write_bytes(raw + end if sealed else raw)
    with pytest.raises(DataError, match=MANIFEST):
        read_manifest(folder)


@given(st.data())
def test_one_altered_byte_is_always_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("one")
    write_manifest(folder, GOOD)
    raw = bytearray((folder / MANIFEST).read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    (folder / MANIFEST).write_bytes(raw)
    with pytest.raises(DataError, match=MANIFEST):
        read_manifest(folder)


def link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda path: None, "missing", id="absent"),
        pytest.param(link, "a symbolic link", id="a link"),
        pytest.param(lambda path: os.mkfifo(path), "not a regular file", id="a pipe that nobody writes to"),
        pytest.param(lambda path: path.mkdir(), "not a regular file", id="a folder"),
    ],
)
def test_only_a_regular_file_is_measured(tmp_path: Path, make: Callable[[Path], None], words: str) -> None:
    make(tmp_path / "x")
    with pytest.raises(DataError, match=rf"{tmp_path}/x: {words}"):
        measure(tmp_path, "x")


def test_no_link_on_the_way_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").write_bytes(b"x")
    (tmp_path / "sub").symlink_to("there")
    with pytest.raises(DataError, match="sub/x: not below a plain folder"):
        measure(tmp_path, "sub/x")
    assert measure(tmp_path, "there/x")[0] == 1


def test_a_sealed_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    write_sealed(tmp_path / "x.json", {"n": 1})
    with pytest.raises(DataError):
        write_sealed(tmp_path / "x.json", {"n": object()})
    assert read_sealed(tmp_path / "x.json").whole("n") == 1
    write_sealed(tmp_path / "x.json", {"n": 2})
    assert read_sealed(tmp_path / "x.json").whole("n") == 2
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_folder_that_is_gone_is_no_finding_about_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_manifest(tmp_path / "absent", replace(GOOD, loss=None))


@pytest.mark.parametrize(
    ("name", "safe"),
    [("a", True), (".metadata", True), ("a/b", True), ("", False), ("a/", False), ("..", False), ("a" * 1025, False)],
)
def test_names_that_stay_below(name: str, safe: bool) -> None:
    assert is_safe(name) is safe


def test_drafts_are_told_from_files() -> None:
    names = (".manifest.json.12-345", ".rank-3.json.12-345", "manifest.json", ".metadata", "rank-3.json", ".x.12-3")
    assert [is_draft(name) for name in names] == [True, True, False, False, False, False]
