"""The site file: what it says of a node, what it may not say, and what happens when it changes."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.core.errors import ConfigError
from trainwarden.core.site import SiteFile, load_site

EXAMPLE = Path(__file__).parents[2] / "deploy" / "site.example.yaml"


def written(folder: Path, text: str) -> Path:
    file = folder / "site.yaml"
    file.write_text(text)
    return file


def test_entries_add_to_what_others_say_and_unknown_nodes_are_absent(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        site:
          nodes:
            - {hosts: "gpu[001-004]", domains: {pod: a, row: "7"}}
            - {hosts: "gpu[003-004],login", domains: {rack: "r2", pod: a}}
            - {hosts: gpu001, domains: {rack: 012}, rails: [su1-rail0, su1-rail1]}
        """,
    )
    assert load_site(file) == {
        "gpu001": {"pod": "a", "row": "7", "rack": "012", "rail.0": "su1-rail0", "rail.1": "su1-rail1"},
        "gpu002": {"pod": "a", "row": "7"},
        "gpu003": {"pod": "a", "row": "7", "rack": "r2"},
        "gpu004": {"pod": "a", "row": "7", "rack": "r2"},
        "login": {"pod": "a", "rack": "r2"},
    }


def test_the_example_is_one() -> None:
    table = load_site(EXAMPLE)
    assert table["gpu001"]["rack"] == "r01"
    assert table["gpu001"]["rail.7"]
    assert all("row" in told for node, told in table.items() if node.startswith("gpu"))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        pytest.param(
            "- {hosts: 'n[1-4]', domains: {rack: r1}}\n- {hosts: n4, domains: {rack: r2}}",
            "site.nodes[1].domains.rack: n4 has rack r1 by site.nodes[0], got r2",
            id="a node in two racks",
        ),
        pytest.param(
            "- {hosts: n1, rails: [a, b]}\n- {hosts: n1, domains: {rail.1: c}}",
            "site.nodes[1].domains.rail.1: n1 has rail.1 b by site.nodes[0], got c",
            id="a device on two rails",
        ),
        pytest.param(
            "- {hosts: n1, domain: {rack: r1}}",
            'site.nodes[0].domain: is not known here, got {"rack": "r1"}; allowed: domains, hosts, rails',
            id="a misspelt key",
        ),
        pytest.param(
            "- {hosts: 'n[5-1]', domains: {rack: r1}}",
            "site.nodes[0].hosts: host list 'n[5-1]': needs a range that counts up, both ends as wide, got 5-1",
            id="a bad range",
        ),
        pytest.param(
            "- {hosts: n1, domains: {rack: Unknown}}",
            "site.nodes[0].domains.rack: need what all of it is called, at most 128 characters, got 'Unknown'; "
            "leave out what is not known",
            id="a word for not known",
        ),
        pytest.param(
            "- {hosts: n1, domains: {The Rack: r1}}",
            "site.nodes[0].domains.The Rack: need small letters, digits and _.-, at most 63, got 'The Rack'",
            id="a bad name",
        ),
        pytest.param("- {hosts: n1}", "site.nodes[0]: need domains or rails", id="nothing said"),
        pytest.param(
            "- {hosts: '', domains: {rack: r1}}",
            "site.nodes[0].hosts: need a host list such as gpu[001-128], got none",
            id="no hosts",
        ),
        pytest.param("- {domains: {rack: r1}}", "site.nodes[0].hosts: is missing", id="hosts missing"),
        pytest.param(
            "- {hosts: n1, domains: {rack: 7}}",
            "site.nodes[0].domains.rack: needs text, got 7",
            id="a rack that is a number",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, entries: str, message: str) -> None:
    indented = entries.replace("\n", "\n    ")
    file = written(tmp_path, f"site:\n  nodes:\n    {indented}\n")
    with pytest.raises(ConfigError) as refused:
        load_site(file)
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"{file}: ")


def test_racks_of_one_name_in_two_rows_are_found_out(tmp_path: Path) -> None:
    text = """
        site:
          within: {rack: row}
          nodes:
            - {hosts: n1, domains: {rack: r1, row: a}}
            - {hosts: n2, domains: {rack: r1, row: b}}
            - {hosts: n3, domains: {rack: r1}}
        """
    with pytest.raises(ConfigError, match=r"site\.within\.rack: rack r1 lies in row a by n1 and in b by n2"):
        load_site(written(tmp_path, text))
    assert load_site(written(tmp_path, text.replace("row: b", "row: a")))


def test_a_change_is_taken_up_and_a_bad_one_is_not(tmp_path: Path) -> None:
    text = "site: {nodes: [{hosts: 'n[1-3]', domains: {rack: r1}}]}"
    site = SiteFile(written(tmp_path, text))
    assert site.refresh() == frozenset()
    written(tmp_path, text.replace("n[1-3]", "n[2-40]"))
    assert site.refresh() == {"n1", *(f"n{number}" for number in range(4, 41))}
    written(tmp_path, text.replace("domains", "domain"))
    with pytest.raises(ConfigError, match=r"nodes\[0\]\.domain: is not known here"):
        site.refresh()
    assert site.refresh() == frozenset(), "said once"
    assert site.table["n40"] == {"rack": "r1"}
    (tmp_path / "site.yaml").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        site.refresh()
    assert site.table["n40"] == {"rack": "r1"}, "what was known stays"


def test_a_file_that_takes_its_place_is_noticed(tmp_path: Path) -> None:
    """As Kubernetes replaces the files of a ConfigMap: by a link, of one size and perhaps one time."""
    for name, rack in (("a", "r1"), ("b", "r2")):
        (tmp_path / name).write_text(f"site: {{nodes: [{{hosts: n1, domains: {{rack: {rack}}}}}]}}")
        os.utime(tmp_path / name, ns=(0, 0))
    (tmp_path / "site.yaml").symlink_to("a")
    site = SiteFile(tmp_path / "site.yaml")
    (tmp_path / "new").symlink_to("b")
    (tmp_path / "new").rename(tmp_path / "site.yaml")
    assert site.refresh() == {"n1"}
    assert site.table["n1"] == {"rack": "r2"}


ENTRIES = st.sampled_from(
    [
        "{hosts: 'n[1-3]', domains: {rack: r1}}",
        "{hosts: n2, domains: {rack: r2, row: a}}",
        "{hosts: 'n[2-', domains: {rack: r1}}",
        "{hosts: n4, rails: [a, unknown]}",
        "{hosts: 3}",
        "[]",
        "n1",
        "",
    ]
)


@settings(max_examples=200)
@given(st.lists(ENTRIES, max_size=4), st.sampled_from(["", "{rack: row}", "{rack: 3}", "[rack]"]))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, entries: list[str], within: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any-site.yaml"
    file.write_text("\n".join(["site:", f"  within: {within}", "  nodes:", *(f"    - {one}" for one in entries)]))
    with suppress(ConfigError):
        told = [value for told in load_site(file).values() for value in told.values()]
        assert not {"", "unknown"} & set(told)
