"""Rows of measured systems: names, gaps and contradictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.errors import DataError
from megabatch.plan.rows import (
    SystemRow,
    generation,
    kind_of,
    read_rows,
    refuse_contradicting,
    spelled,
)

HEAD = "round,org,system,division,accel,net,nodes,acc_per_node,N,gbs,local_b,img_s,step_ms,ttt_s,ttt_cv_pct,epochs,runs"


def rows_of(folder: Path, *lines: str) -> tuple[list[SystemRow], list[str]]:
    path = folder / "rows.csv"
    path.write_text("\n".join((HEAD, *lines)) + "\n", encoding="utf-8")
    return read_rows(path)


def test_families_and_stacks(tmp_path: Path) -> None:
    rows, aside = rows_of(
        tmp_path,
        "1.1,Dell,2xR750xax4A100-PCIE-80GB,closed,NVIDIA A100-PCIE-80GB (3W),E,2,4,8,3264,408.0,23331,139.9,1,0,35,5",
        "1.1,Dell,R750xax4A100-PCIE-80GB,closed,NVIDIA A100-PCIe-80GB,EDR,1,4,4,1632,408.0,11884,137.33,1,0,35,5",
        "2.0,NVIDIA,dgxa100_n8_ngc22.04_mxnet,closed,NVIDIA A100-SXM4-80GB,x,8,8,64,3264,51.0,166862,19.56,1,0,35,5",
        "0.7,Google,tpu-v4-512-TF,closed,TPU,TODO,1,256,256,8192,32.0,574579,14.26,1,0,44.0,5",
        "0.7,SIAT,modelarts_512_tensorflow_open,,Ascend910,,64,8,512,16384,32.0,603257,27.16,1,0,20,5",
    )
    assert aside == []
    assert rows[0].family == rows[1].family == "dell:a100-pcie-80gb"
    assert rows[0].chassis == rows[1].chassis
    assert rows[2].family == "nvidia:dgxa100"
    assert rows[2].stack == "2.0 mxnet closed"
    assert [row.kind for row in rows] == ["gpu", "gpu", "gpu", "tpu", "other"]
    assert rows[4].stack == "0.7 tensorflow open"


def test_workers_are_read_from_old_names(tmp_path: Path) -> None:
    rows, aside = rows_of(
        tmp_path,
        "0.6,NVIDIA,dgx1_n130_ngc19.05_mxnet,,,,,,0,54080,,1141097,47.39,101.4,1.75,86,5",
        "0.6,NVIDIA,dgx2h_ngc19.05_mxnet,,,,,,0,3328,,24417,136.3,3163.7,2.6,60,5",
        "0.7,DellEMC,4xC4140,closed,Nvidia Tesla V100-SXM2-32GB,1Gb,,4,0,3328,,22023,151.11,2392.9,0.03,41,5",
        "1.0,Intel,2-nodes-16s-8376H-tensorflow,closed,N/A,,2,0,0,3264,,1311,2490.58,35318.5,0.42,35,5",
        "1.0,Who,mystery,closed,N/A,,2,0,0,3264,,1311,2490.58,35318.5,0.42,35,5",
    )
    found = [(row.world_size, row.num_nodes, row.local_batch) for row in rows]
    assert found == [(1040, 130, 52), (16, 1, 208), (16, 4, 208), (16, 2, 204)]
    assert "mystery" in aside[0]


GOOD = "2.0,NVIDIA,dgxa100_n8_mxnet,closed,A100,x,8,8,64,3264,51.0,166862,19.56,1,0,35,5"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (GOOD.replace(",51.0,", ",52.9,"), "line 2 contradicts itself: 64 workers x local_b 52.9 is not gbs 3264"),
        (GOOD.replace(",19.56,", ",29.56,"), "line 2 contradicts itself: gbs 3264 at 166862 img_s"),
        (GOOD.replace(",19.56,", ",-19.56,"), r"line 2: step_ms is -19.56; give a number from 1e-06 to 1e\+09"),
        (GOOD.replace(",19.56,", ",0,"), "line 2: step_ms is 0; give a number from"),
        (GOOD.replace(",19.56,", ",,"), "line 2 has no step_ms"),
        (GOOD.replace(",19.56,", ",fast,"), "step_ms is 'fast'; give a number"),
        (GOOD.replace(",19.56,", ",nan,"), "step_ms is nan; give a number"),
        (GOOD.replace(",19.56,", ",1e300,"), "step_ms is 1e300; give a number"),
        (GOOD.replace(",51.0,", ",1e300,"), r"local_b is 1e300; give 0 or a number from 1 to 1e\+09"),
        (GOOD.replace(",64,", ",8.5,"), r"N is 8.5; give 0 or a whole number from 1 to 1e\+09"),
        (GOOD.replace(",64,", ",1e30,"), "N is 1e30; give 0 or a whole number"),
        (GOOD.replace(",8,8,", ",8.5,8,"), "nodes is 8.5; give 0 or a whole number"),
        (GOOD.replace(",64,3264,51.0,166862", ",64,32,,"), "gbs 32 on 64 workers is less than an image each"),
        (
            GOOD.replace("dgxa100_n8_mxnet", '"dgxa100\n_n8_mxnet"'),
            r"system is 'dgxa100\\n_n8_mxnet'; give text without line breaks",
        ),
        (f"{GOOD}\n{GOOD.replace('166862,19.56', '111241,29.34')}", "lines 2 and 3 contradict each other"),
    ],
)
def test_contradictions_are_one_clear_line(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        rows_of(tmp_path, line)
    assert "\n" not in str(caught.value)


def test_a_file_without_the_columns(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(DataError, match="needed are N, step_ms and local_b or gbs"):
        read_rows(tmp_path / "x.csv")
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 4: step_ms is 1e300"):
        rows_of(tmp_path, GOOD, "", GOOD.replace(",19.56,", ",1e300,"))


@pytest.mark.parametrize(
    ("columns", "cells", "nodes"),
    [
        ("N,local_b,step_ms", "64,51,19.56", 8),
        ("N,local_b,step_ms", "4,51,19.56", 1),
        ("N,local_b,step_ms", "65,51,19.56", 9),
        ("N,acc_per_node,local_b,step_ms", "64,4,51,19.56", 16),
        ("N,nodes,acc_per_node,local_b,step_ms", "64,,16,51,19.56", 4),
        ("N,nodes,local_b,step_ms", "64,2,51,19.56", 2),
        ("N,system,local_b,step_ms", "64,dgx2_mxnet,51,19.56", 4),
        ("N,system,nodes,acc_per_node,local_b,step_ms", ",mine,3,4,51,19.56", 3),
    ],
)
def test_nodes_where_a_row_does_not_tell_them(tmp_path: Path, columns: str, cells: str, nodes: int) -> None:
    (tmp_path / "x.csv").write_text(f"{columns}\n{cells}\n", encoding="utf-8")
    (row,), remarks = read_rows(tmp_path / "x.csv")
    assert row.num_nodes == nodes
    assert remarks == []


def test_nodes_that_do_not_hold_the_workers_are_doubted(tmp_path: Path) -> None:
    (row,), remarks = rows_of(tmp_path, GOOD.replace(",8,8,64,", ",8,4,64,"))
    assert (row.world_size, row.num_nodes) == (64, 8)
    assert remarks == ["line 2 (dgxa100_n8_mxnet): 8 nodes x 4 is not N 64; N is believed"]


def mine(folder: Path, *lines: str) -> tuple[SystemRow, ...]:
    (folder / "mine.csv").write_text("\n".join(("N,nodes,local_b,step_ms", *lines)) + "\n", encoding="utf-8")
    return tuple(read_rows(folder / "mine.csv")[0])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ("8,1,64,100", "8,1,128,94"),
            "lines 2 and 3 .* 8 workers take 100 ms for 64 images each but 8 .* 94 ms for 128",
        ),
        (("16,2,32,79", "8,1,32,100"), "lines 2 and 3 .* 8 workers take 100 ms for 32 .* 16 workers take 79 ms for 32"),
        (("8,1,64,100", "8,1,64,101", "64,8,64,60"), "lines 2 and 4 contradict each other"),
        (("8,1,64,100", "64,8,128,60"), "lines 2 and 3 contradict each other"),
    ],
)
def test_rows_that_no_law_fits_together_are_refused(tmp_path: Path, lines: tuple[str, ...], words: str) -> None:
    rows = mine(tmp_path, *lines)
    with pytest.raises(DataError, match=words) as caught:
        refuse_contradicting(rows, "mine.csv")
    assert "fix or remove one" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "lines",
    [
        ("8,1,64,100", "8,1,128,96"),  # within 5 %
        ("8,1,64,100", "16,2,64,81"),  # within 20 %
        ("8,1,64,100", "8,2,65,90"),  # other nodes
        ("8,1,64,100", "8,1,32,50"),  # less work in less time
        ("8,1,64,100", "64,8,32,70"),
        ("8,1,64,100",),
        (),
    ],
)
def test_rows_that_may_stand_together(tmp_path: Path, lines: tuple[str, ...]) -> None:
    refuse_contradicting(mine(tmp_path, *lines) if lines else (), "mine.csv")


@pytest.mark.parametrize(
    ("text", "system", "name", "of", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB (400W)", "box", "a100-sxm-80gb", "a100", "gpu"),
        ("A100-PCIe-40GB", "", "a100-pcie-40gb", "a100", "gpu"),
        ("Nvidia Tesla V100-SXM2-32GB", "2xC4140", "v100-sxm-32gb", "v100", "gpu"),
        ("", "dgx2h_n96_ngc19.05_mxnet", "dgx2h", "v100", "gpu"),
        ("NVIDIA H100-SXM5-80GB", "dgxh100_n8", "dgxh100", "h100", "gpu"),
        ("TPU", "tpu-v4-128-TF", "tpu-v4", "tpu-v4", "tpu"),
        ("Ascend 910 Pro A", "CloudBrainII_256", "ascend-910-pro-a", "ascend910", "other"),
        ("Ascend910", "modelarts", "ascend910", "ascend910", "other"),
        ("Habana Gaudi2", "HLS", "gaudi2", "gaudi2", "other"),
        ("Tesla V100 SXM2 16 GB", "", "v100-sxm-16-gb", "v100", "gpu"),
        ("", "", "unknown", "unknown", "other"),
    ],
)
def test_one_name_for_one_thing(text: str, system: str, name: str, of: str, kind: str) -> None:
    assert spelled(text, system) == name
    assert generation(name) == of
    assert kind_of(name) == kind
