"""Host lists: what Slurm writes is read as Slurm means it, anything else is refused."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.core.errors import DataError
from trainwarden.core.hostlist import HOSTS_MAX, expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        pytest.param("", [], id="none"),
        pytest.param("login", ["login"], id="one"),
        pytest.param("n[8-11]", ["n8", "n9", "n10", "n11"], id="a range"),
        pytest.param("n[08-10]", ["n08", "n09", "n10"], id="zeros are kept"),
        pytest.param("n[99-101]", ["n99", "n100", "n101"], id="a wider end"),
        pytest.param("n[1,3-4],m2-ib", ["n1", "n3", "n4", "m2-ib"], id="lists of lists"),
        pytest.param("r[1-2]n[1-2].x", ["r1n1.x", "r1n2.x", "r2n1.x", "r2n2.x"], id="two brackets"),
        pytest.param("n1,n[1-2]", ["n1", "n2"], id="each once"),
    ],
)
def test_lists(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("n[1-2", "brackets closed", id="an open bracket"),
        pytest.param("n[[1]]", "brackets closed", id="brackets in brackets"),
        pytest.param("a,,b", "commas", id="nothing between commas"),
        pytest.param("a b", "letters", id="a blank"),
        pytest.param("n[]", "[ranges] only", id="an empty bracket"),
        pytest.param("n[1-]", "such as 001-128, got '1-'", id="no end"),
        pytest.param("n[0-8/2]", "such as 001-128, got '0-8/2'", id="a step"),
        pytest.param("n[5-1]", "counts up", id="downwards"),
        pytest.param("n[1-010]", "both ends as wide", id="zeros at the end only"),
        pytest.param("n[0-999999999]", f"at most {HOSTS_MAX}", id="too many"),
        pytest.param("n[0-999][0-999]", f"at most {HOSTS_MAX} hosts, got 1000000", id="too many together"),
        pytest.param("@gpus", "letters", id="a group"),
    ],
)
def test_what_is_no_list_is_refused(text: str, why: str) -> None:
    with pytest.raises(DataError, match=re.escape(why)):
        expand(text)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z][a-z0-9.-]{0,5}", fullmatch=True),
            st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20), st.integers(1, 4)), min_size=1, max_size=3),
            st.sampled_from(["", "-ib", ".x"]),
        ),
        max_size=4,
    )
)
def test_a_list_that_is_written_is_read_again(words: list[tuple[str, list[tuple[int, int, int]], str]]) -> None:
    text, hosts = [], []
    for head, ranges, tail in words:
        written = [f"{first:0{width}}-{first + more:0{width}}" for first, more, width in ranges]
        text.append(f"{head}[{','.join(written)}]{tail}")
        numbers = [f"{number:0{width}}" for first, more, width in ranges for number in range(first, first + more + 1)]
        hosts += [head + number + tail for number in numbers]
    assert expand(",".join(text)) == [*dict.fromkeys(hosts)]


@settings(max_examples=200)
@given(st.text(alphabet="an09[]-,. /:@", max_size=30) | st.text(max_size=30))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    try:
        hosts = expand(text)
    except DataError:
        return
    assert len(hosts) == len(set(hosts)) <= HOSTS_MAX
    assert not any(set("[], ") & set(host) for host in hosts)


def test_the_lists_of_a_real_cluster(shared: Path) -> None:
    """A partition line tells how many nodes it has."""
    told = (shared / "data/scheduler/gcm_sample-scontrol-output.txt").read_text()
    partitions = re.findall(r" Nodes=(\S+) .* TotalNodes=(\d+) ", told)
    assert [len(expand(nodes)) for nodes, _ in partitions] == [int(count) for _, count in partitions]
    assert len(partitions) > 1
