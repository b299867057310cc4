"""Bad input: which test shows what happens, clause by clause; and what no other file asks.

The clauses are those of docs/architecture.md ("Bad input and broken surroundings") that stand today.
"""

import ast
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectors.dumpmaking import a_dump, an_entry, as_json
from tests.collectors.world import World, a_world

from trainwarden.app.node_jobs import JobRoot, JobSource
from trainwarden.collectors.nccl.columns import columns
from trainwarden.collectors.nccl.restricted import Refused, load
from trainwarden.core.codec import dumps
from trainwarden.core.model import Event

TESTS = Path(__file__).resolve().parent
SHOWN_BY = {
    "a hostile pickle executes nothing and is named": (
        "collectors/test_restricted.py::test_a_pickle_that_calls_something_calls_nothing_and_is_named",
        "collectors/test_restricted.py::test_no_opcode_finds_anything_to_call",
        "collectors/test_restricted.py::test_bombs_cost_bounded_memory_and_time_and_what_lies_beside_them_is_read",
    ),
    "an empty or half dump among good ones does not stop the analysis": (
        "collectors/test_dumps_source.py::test_broken_dumps_are_named_once_and_the_others_told",
        "collectors/test_dumps_source.py::test_a_real_folder_with_an_empty_dump_tells_the_other_ranks",
        "collectors/test_dumps.py::test_a_real_gloo_hang_shows_who_never_came_though_one_dump_is_empty",
        "collectors/test_restricted.py::test_what_is_no_whole_dump_is_refused",
    ),
    "a dump of a wrong version or rank": (
        "collectors/test_dumps.py::test_each_version_is_read_by_its_keys_and_what_it_lacks_is_not_made_up",
        "collectors/test_dumps.py::test_a_file_whose_rank_is_in_none_of_its_groups_is_of_another_rank",
    ),
    "DCGM's blanks never become numbers": (
        "collectors/test_dcgm.py::test_a_blank_never_becomes_a_number",
        "collectors/test_dcgm.py::test_what_cannot_be_is_no_data",
        "collectors/test_dcgm.py::test_numbers_of_a_real_fleet_are_none_of_them_taken_for_blanks",
    ),
    "counters that begin with any value, fall or stop raise nothing": (
        "collectors/test_infiniband.py::test_counters_are_told_as_they_are_and_resets_raise_nothing",
        "collectors/test_pcie.py::test_a_device_that_goes_or_comes_is_no_error",
        "collectors/test_dcgm.py::test_a_counter_is_handed_on_as_it_is_whatever_it_starts_with",
        "collectors/test_dcgm.py::test_the_last_xid_is_a_reading_and_never_an_event",
    ),
    "link_downed=255 raises nothing by itself": (
        "collectors/test_infiniband.py::test_a_healthy_server_with_counters_that_stopped_long_ago_raises_nothing",
    ),
    "the dmesg of a real hang has no false Xid": ("collectors/test_kmsg.py::test_the_dmesg_of_a_real_hang_has_no_xid",),
    "a link, FIFO or sparse terabyte in place of a ring, dump or log is refused": (
        "collectors/test_rings_hostile.py::test_what_is_no_ring_is_refused_once_and_the_others_are_read",
        "conformance/test_sources.py::test_what_a_tenant_put_beside_it_is_refused_once_by_name_and_the_rest_is_told",
        "collectors/test_restricted.py::test_a_folder_s_symbolic_links_fifos_and_sparse_terabytes_are_refused",
        "test_bad_input.py::test_files_that_a_keeper_would_write_are_not_read_where_a_tenant_can",
    ),
    "a ring torn by a crash: what is whole counts, the tear is told": (
        "collectors/test_rank_faults.py::test_what_a_killed_rank_wrote_survives_it",
        "collectors/test_rank_faults.py::test_a_row_counts_when_it_is_whole",
        "collectors/test_rank_faults.py::test_a_damaged_row_is_lost_and_those_after_it_are_not",
        "collectors/test_rings_hostile.py::test_a_ring_cut_short_under_the_reader_is_let_go",
    ),
    "no room, a read-only or a network file system for the ring": (
        "collectors/test_rank_faults.py::test_no_room_for_a_ring_is_said_once_and_the_training_ends_the_same",
        "collectors/test_rank_faults.py::test_a_tmpfs_that_others_filled",
        "app/test_node_agent.py::test_a_folder_on_a_disk_or_with_a_mount_below_it_is_refused",
    ),
    "frames late, twice, out of order, of an old epoch, with a skewed clock, with garbage numbers": (
        "core/test_steps.py::test_rule_1_rank_clocks_close_nothing",
        "core/test_steps.py::test_rule_2_the_first_row_of_a_rank_wins_and_copies_are_counted",
        "core/test_steps.py::test_rule_3_an_epoch_below_is_dropped_and_counted",
        "core/test_steps.py::test_rule_7_beyond_ten_windows_a_row_is_garbage",
        "core/test_steps_replay.py::test_rule_10_the_cut_into_frames_does_not_matter",
        "app/test_ingest.py::test_what_comes_again_is_passed_over_and_what_is_missing_is_said",
        "app/test_ingest.py::test_a_bad_frame_costs_itself_only",
        "core/test_wire.py::test_one_bad_event_of_a_batch_spoils_no_other",
    ),
    "an unknown Xid or a garbled line of the kernel": (
        "collectors/test_kernel_grammar.py::test_a_garbled_xid_is_told_without_a_code",
        "collectors/test_kernel_grammar.py::test_no_text_raises_and_what_is_said_is_plain_json",
        "collectors/test_kernel_grammar.py::test_hostile_text_is_cleaned_and_capped",
    ),
    "what is absent is never zero": (
        "conformance/test_sources.py::test_a_file_that_is_broken_takes_numbers_away_and_changes_none",
        "conformance/test_sources.py::test_what_is_broken_is_blind_once_and_up_when_it_is_back",
        "collectors/test_nvml.py::test_what_nvml_does_not_tell_is_absent_and_never_zero",
        "collectors/test_nvml_answers.py::test_numbers_that_are_none_are_dropped",
    ),
    "a field, label or key of a newer version; a required one missing": (
        "core/test_wire.py::test_keys_of_a_newer_release_are_ignored_and_missing_ones_are_named",
        "core/test_wire.py::test_messages_come_back_and_unknown_ones_are_counted",
        "collectors/test_dcgm.py::test_an_answer_without_a_gpu_is_blind",
        "collectors/test_rings_hostile.py::test_hellos_tell_no_more_than_they_should",
        "collectors/test_nvml.py::test_a_signal_that_vanishes_is_told_once_and_its_return_too",
    ),
    "settings with an unknown key, a bad unit or a contradiction": (
        "core/test_config.py::test_a_bad_file_is_refused_with_its_message",
        "app/test_node_agent.py::test_settings_that_are_wrong_are_refused_with_their_key",
    ),
    "a source or vendor's call that hangs": (
        "app/test_isolation.py::test_a_source_that_hangs_holds_up_nobody",
        "app/test_isolation.py::test_an_end_does_not_wait_for_a_source_that_hangs",
        "collectors/test_nvml.py::test_a_call_that_hangs_is_named_its_reader_killed_and_the_others_go_on",
        "collectors/test_mounts.py::test_a_mount_that_hangs_holds_one_thread_and_nobody_else",
        "collectors/test_dcgm.py::test_an_exporter_that_hangs_is_waited_for_until_the_deadline",
        "collectors/test_restricted.py::test_a_file_system_that_does_not_answer_costs_one_deadline",
        "conformance/test_third_party_sources.py::test_one_that_hangs_while_it_is_made_is_blind_and_the_others_go_on",
    ),
    "a server that is down or does not read, a network that is cut, a disk that is full": (
        "app/test_ingest.py::test_after_a_cut_everything_that_was_not_acknowledged_comes_again",
        "app/test_ingest.py::test_a_server_that_does_not_read_costs_frames_and_never_the_caller",
        "app/test_ingest.py::test_a_peer_that_went_without_a_word_is_given_up",
        "core/test_recording.py::test_a_full_disk_is_counted_and_leaves_no_half_file",
        "core/test_recording.py::test_an_unwritable_directory_is_counted_and_recording_goes_on_when_it_heals",
    ),
    "who has no token, another node's or job's": (
        "app/test_ingest.py::test_who_is_not_one_of_ours_hears_why",
        "core/test_auth.py::test_what_a_token_lets_through",
    ),
}
"""Clause -> tests that show what happens."""
PARSERS = {
    "kernel lines": ("collectors/test_kernel_grammar.py",),
    "kernel log records": ("collectors/test_kmsg.py",),
    "dumps": ("collectors/test_restricted.py", "test_bad_input.py"),
    "rings": ("collectors/test_rings_hostile.py",),
    "hellos": ("test_bad_input.py",),
    "Prometheus text": ("collectors/test_prometheus_text.py",),
    "DCGM's answers": ("collectors/test_dcgm.py",),
    "NVML's answers": ("collectors/test_nvml_answers.py",),
    "ports": ("collectors/test_infiniband.py",),
    "the host": ("collectors/test_host.py",),
    "AER counters": ("collectors/test_pcie.py",),
    "the table of mounts": ("collectors/test_mounts.py",),
    "torchrun's table": ("collectors/test_torchrun.py",),
    "the wire": ("core/test_wire.py",),
    "frames and things": ("core/test_codec_frames.py", "core/test_codec.py"),
    "recordings": ("core/test_recording.py",),
    "settings": ("core/test_config.py",),
}
"""Parser -> files whose property tests try it."""
EXAMPLES = 200
"""Random inputs that the default suite gives each parser; `make fuzz` gives each property test 10,000."""
DEFAULT_EXAMPLES = 100


@cache
def found_in(path: Path) -> tuple[ast.FunctionDef, ...]:
    found = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
    return tuple(node for node in found if node.name.startswith("test_"))


@pytest.mark.parametrize("clause", SHOWN_BY)
def test_each_clause_is_shown_by_tests_that_are_there(clause: str) -> None:
    for test in SHOWN_BY[clause]:
        file, _, name = test.partition("::")
        assert name in {one.name for one in found_in(TESTS / file)}, test


@pytest.mark.parametrize("parser", PARSERS)
def test_each_parser_is_given_so_many_random_inputs(parser: str) -> None:
    asked = [examples(one) for file in PARSERS[parser] for one in found_in(TESTS / file)]
    assert sum(asked) >= EXAMPLES


def examples(function: ast.FunctionDef) -> int:
    """How many examples a property test asks for; 0: it is none."""
    calls = {ast.unparse(call.func): call for call in function.decorator_list if isinstance(call, ast.Call)}
    if "given" not in calls:
        return 0
    own = {one.arg: ast.literal_eval(one.value) for one in calls["settings"].keywords} if "settings" in calls else {}
    return int(own.get("max_examples", DEFAULT_EXAMPLES))


def test_make_fuzz_finds_every_property_test() -> None:
    """It selects by the mark that hypothesis gives a test; a property inside of a test has none."""
    for path in TESTS.rglob("test_*.py"):
        uses = len(re.findall(r"^ *@given\(", path.read_text(), re.MULTILINE))
        assert not uses or uses == len([one for one in found_in(path) if examples(one)]), path


# what a keeper writes, in a folder of a tenant's


RECORD = {"launcher": True, "pid": 1, "code": None, "signal": 9, "t_ns": 1, "oom": False}


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    "put",
    [
        pytest.param(lambda path: path.write_text(json.dumps(RECORD) + "\n"), id="a forged end"),
        pytest.param(lambda path: path.write_text("{}\n"), id="no record"),
        pytest.param(os.mkfifo, id="a FIFO"),
        pytest.param(sparse, id="a sparse terabyte"),
    ],
)
def test_files_that_a_keeper_would_write_are_not_read_where_a_tenant_can(put: Callable[[Path], object]) -> None:
    """An exit status is a hard fact: it comes from the kernel alone."""
    with a_world() as world:
        world.attach(0, 1)
        put(world.root / world.job / "exits.jsonl")
        source = job_source(world)
        told = [*source.poll(time.time_ns()), *source.poll(time.time_ns() + 10**9)]
        source.close()
    kinds = {item.kind for item in told if isinstance(item, Event)}
    assert "hello" in kinds
    assert not kinds & {"process.exit", "launcher.failure"}


def job_source(world: World) -> JobSource:
    where = JobRoot(job=world.job, root=world.root, uid=os.getuid(), stamp=(0, 0))
    return JobSource(where, "n1", start_ns=time.time_ns())


# hellos, and dumps as JSON

HELLO = {
    **{"rank": 1, "world_size": 2, "coords": {}, "slot": "n1:1", "device": "n1:1", "node": "n1", "pid": 1},
    **{"start_time": 9, "uid": 0, "ring": "r", "clock": "cpu", "blind": [], "attempt": 0, "restart": 0, "lap": 0},
    "versions": {},
}
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ANYTHING = (
    LEAVES | st.lists(LEAVES, max_size=2) | st.dictionaries(st.sampled_from(["dp", "pp", "x"]), LEAVES, max_size=2)
)


@pytest.fixture(scope="module")
def trusting() -> Iterator[World]:
    with a_world() as world:
        (world.root / world.job / "hello").mkdir(parents=True)
        yield world


@settings(max_examples=200)
@given(changes=st.dictionaries(st.sampled_from([*HELLO]), ANYTHING, min_size=1, max_size=3))
def test_whatever_a_hello_says_it_is_told_or_refused(trusting: World, changes: dict[str, object]) -> None:
    """And what is told can be sent, and its process looked for."""
    path = trusting.root / trusting.job / "hello" / "rank-1-0-0-0.json"
    path.unlink(missing_ok=True)
    path.write_text(json.dumps({**HELLO, **changes}))
    source = job_source(trusting)
    told = [item for item in source.poll(time.time_ns()) if isinstance(item, Event)]
    source.close()
    assert [event.kind for event in told if event.kind in ("hello", "source.blind")]
    for event in told:
        assert dumps(event).isprintable()


@st.composite
def spoilt_json(draw: st.DrawFn) -> bytes:
    data = bytearray(as_json(a_dump(an_entry(0), an_entry(1))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4) | st.sampled_from([b"{", b"]", b"1e999"]))
    return bytes(data)


@settings(max_examples=200)
@given(spoilt_json())
def test_whatever_a_dump_of_json_holds_it_is_told_or_refused(data: bytes) -> None:
    try:
        header, _ = columns(load(data))
    except Refused:
        return
    json.dumps(header, allow_nan=False)
