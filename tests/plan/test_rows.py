"""Rows of measured systems: names, gaps and contradictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.errors import DataError
from megabatch.plan.rows import Row, read_rows

HEAD = "round,org,system,division,accel,net,nodes,acc_per_node,N,gbs,local_b,img_s,step_ms,ttt_s,ttt_cv_pct,epochs,runs"


def rows_of(folder: Path, *lines: str) -> tuple[list[Row], list[str]]:
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
    found = [(row.num_workers, row.num_nodes, row.local_batch) for row in rows]
    assert found == [(1040, 130, 52), (16, 1, 208), (16, 4, 208), (16, 2, 204)]
    assert "mystery" in aside[0]


GOOD = "2.0,NVIDIA,dgxa100_n8_mxnet,closed,A100,x,8,8,64,3264,51.0,166862,19.56,1,0,35,5"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (GOOD.replace(",51.0,", ",52.9,"), "line 2 contradicts itself: 64 workers x local_b 52.9 is not gbs 3264"),
        (GOOD.replace(",19.56,", ",29.56,"), "line 2 contradicts itself: gbs 3264 at 166862 img_s"),
        (GOOD.replace(",19.56,", ",-19.56,"), "finite number that is not negative"),
        (GOOD.replace(",19.56,", ",0,"), "must be above 0"),
        (GOOD.replace(",19.56,", ",fast,"), "give a number"),
        (GOOD.replace(",19.56,", ",nan,"), "finite number"),
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
