"""Sections, keys and units of cluster files."""

from __future__ import annotations

import pytest

from megabatch.errors import ConfigError
from megabatch.plan.cluster_file import ClusterFile, parse_cluster
from megabatch.plan.edge import RATIO


def parsed(text: str) -> ClusterFile:
    return parse_cluster(text, "cluster file 'x.toml'")


@pytest.mark.parametrize(
    ("key", "value"),
    [("gigabits_per_second", 8), ("gigabytes_per_second", 1), ("bytes_per_second", 1e9)],
)
def test_rates_by_their_units(key: str, value: float) -> None:
    assert parsed(f"[link.nic]\n{key} = {value}").need("link.nic", "rate").value == pytest.approx(1e9)


@pytest.mark.parametrize(
    ("unit", "value"), [("microseconds", 7.2e9), ("milliseconds", 7.2e6), ("seconds", 7200), ("hours", 2)]
)
def test_times_by_their_units(unit: str, value: float) -> None:
    found = parsed(f"[start]\ninitialisation_{unit} = {{ value = {value}, certainty = 'measured' }}")
    quantity = found.need("start", "initialisation")
    assert quantity.value == pytest.approx(7200)
    assert quantity.certainty == "measured"


def test_what_is_not_there() -> None:
    empty = parsed("")
    assert empty.find("price", "per_node_hour") is None
    assert empty.count("num_nodes", optional=True) == 0
    assert empty.list_of_numbers("straggler", "measured_ratios", RATIO) == ()
    assert empty.choice("", "backend", ("nccl", "gloo")) == "nccl"
    assert empty.text("", "name", "nameless") == "nameless"
    assert not empty.switch("measured_here")
    with pytest.raises(ConfigError, match="lacks its latency; give one of latency_microseconds"):
        empty.need("software", "latency")
    with pytest.raises(ConfigError, match="lacks workers_per_node"):
        empty.count("workers_per_node")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("link = 5", r"'link' of .* is 5, but a section is needed; write its keys below a line \[link\]"),
        ("link.nic = 'fast'", r"'nic' of .* is 'fast', but a section is needed"),
        ("straggler = 0.01", r"'straggler' of .* is 0.01, but a section is needed"),
        ("compute = 50", r"'compute' of .* is 50, but a section is needed"),
        ("[[failures]]\nnode_mtbf_hours = 5", r"'failures' of .* but a section is needed"),
        ("[computes]\nmodel = 'x'", "unknown key 'computes' in .* did you mean 'compute'"),
        ("link.fast = {}", "link 'fast' of .* links are worker, nic, rack"),
        ("[software]\nlatency = 1", "'latency' in .software. .* has no unit; write latency_microseconds or"),
        ("[link.rack]\nspeed = 1", "'speed' in .link.rack. .* has no unit; write gigabits_per_second or"),
        ("[loader]\nrate = 1", "'rate' in .loader. .* has no unit; write images_per_second_per_node"),
        ('"a\\nb" = 1', "unknown key 'a.*nb'"),
        ("x = 1" + "0" * 5000, "not valid TOML"),
        ("x = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_shapes_and_keys_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parsed(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["0", "4.5", "true", "'4'", "1000000000000000000", "[4]"])
def test_counts_that_cannot_be(value: str) -> None:
    with pytest.raises(ConfigError, match=r"num_nodes of .* give a whole number from 1 to 1e\+09"):
        parsed(f"num_nodes = {value}").count("num_nodes", optional=True)


def test_words_and_switches_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"backend of .* is 'mpi'; choose one of nccl, gloo"):
        parsed("backend = 'mpi'").choice("", "backend", ("nccl", "gloo"))
    with pytest.raises(ConfigError, match=r"measured_here of .* is 1; give true or false"):
        parsed("measured_here = 1").switch("measured_here")
    with pytest.raises(ConfigError, match=r"currency of .* give text on one line"):
        parsed('[price]\ncurrency = "EUR\\nUSD"').text("price", "currency")
