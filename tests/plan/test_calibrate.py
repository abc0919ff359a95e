"""Calibration sources, told apart by content."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megabatch.comm.calibration import AxisCost, Calibration, calibration_text
from megabatch.errors import ConfigError, DataError, MegabatchError
from megabatch.plan.calibrate import Evidence, gather, pick_rows
from megabatch.plan.cluster_file import load_cluster
from megabatch.plan.compute import step_times_text
from megabatch.recipes import load_config
from tests.plan.laboratory import laboratory
from tests.plan.test_compute import TIMES
from tests.plan.test_fit import row
from tests.plan.test_validate import written


def test_this_machine_needs_its_measurements(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bench step"):
        gather(load_cluster("this-machine"), [])
    axes = (AxisCost(3e-4, 1.6e8, name="column", size=2), AxisCost(1e-3, 4e8, name="row", size=2))
    (tmp_path / "links.json").write_text(calibration_text(Calibration("2x2", 1, "gloo", axes)), encoding="utf-8")
    (tmp_path / "step.json").write_text(step_times_text(TIMES), encoding="utf-8")
    paths = [str(tmp_path / "links.json"), str(tmp_path / "step.json")]
    found = gather(load_cluster("this-machine"), paths)
    assert found.cluster.calibration is not None
    assert found.cluster.compute.model == "resnet8"
    assert found.cluster.straggler_deviation.value == 0.03
    assert found.layers == TIMES.layers
    assert found.sources == (
        "links.json: 2x2 grid with gloo, 2 axes and 0 all-reduces measured",
        "step.json: step times of resnet8 at 32, 64 images (cpu, 1 thread)",
    )


def test_rows_give_a_fit(tmp_path: Path) -> None:
    found = gather(load_cluster("dgx-a100"), [str(written(tmp_path, 20.8))], "nvidia:dgxa100")
    assert found.fit is not None
    assert len(found.fit.rows) == 3
    assert found.fit.evidence == "same system"
    assert found.sources[0].startswith("rows.csv: 3 rows of nvidia:dgxa100, ")


def test_rows_must_be_of_one_family_and_one_stack() -> None:
    own, older = row(8, 408.0), row(8, 408.0, stack="1.1 mxnet closed")
    other = row(8, 400.0, family="else:a100-pcie")
    assert pick_rows([own], "A100-SXM4-80GB", "", "") == [own]
    assert pick_rows([own, older], "A100", own.family, own.stack) == [own]
    assert pick_rows([own], "as found", "", "") == [own]  # a cluster that names none takes what there is
    with pytest.raises(DataError, match="2 families of 'A100'"):
        pick_rows([own, other], "A100", "", "")
    with pytest.raises(DataError, match="must not be mixed"):
        pick_rows([own, older], "A100", own.family, "")
    with pytest.raises(DataError, match="did you mean 'who:a100'"):
        pick_rows([own], "A100", "who:a10", "")


def test_rows_of_another_accelerator_are_refused_by_any_name() -> None:
    own = row(8, 408.0)
    with pytest.raises(DataError, match="no row is of accelerator 'V100', they are of a100; give rows of that"):
        pick_rows([own], "V100", "", "")
    with pytest.raises(DataError, match="no row of family 'who:a100' is of accelerator 'H100-SXM5-80GB'"):
        pick_rows([own], "H100-SXM5-80GB", own.family, own.stack)
    assert pick_rows([own], "NVIDIA A100 (400W)", own.family, "") == [own]


def test_rows_that_do_not_say_their_accelerator(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("N,step_ms,local_b\n8,100,256\n64,110,256\n", encoding="utf-8")
    for family in ("", ":unknown"):
        with pytest.raises(DataError, match="the cluster's is 'A100-SXM4-80GB'; add a column accel") as caught:
            gather(load_cluster("dgx-a100"), [str(path)], family)
        assert "--family" not in str(caught.value)


def rows_file(folder: Path, nodes: int, workers: int, step_ms: float = 110.0) -> str:
    head, first = "org,accel,nodes,N,step_ms,local_b", "me,A100,1,4,100,256"
    path = folder / "rows.csv"
    path.write_text(f"{head}\n{first}\nme,A100,{nodes},{workers},{step_ms},256\n", encoding="utf-8")
    return str(path)


def test_rows_of_other_nodes_are_less_certain(tmp_path: Path) -> None:
    cluster = load_cluster("dgx-a100")
    same = gather(cluster, [rows_file(tmp_path, 8, 64)]).fit
    found = gather(cluster, [rows_file(tmp_path, 16, 64)])
    assert same is not None
    assert found.fit is not None
    assert (same.evidence, found.fit.evidence) == ("same system", "same stack")
    assert found.fit.deviation(256, 64, 8) > same.deviation(256, 64, 8)
    assert "in nodes of 4 workers, those of the cluster hold 8" in found.sources[0]
    assert "calibrated on another machine with the same software" in found.fit.warnings(256, 64, 8)
    whole = gather(cluster, [rows_file(tmp_path, 1, 16)]).fit
    assert whole is not None
    assert whole.evidence == "same stack"  # a node of 16
    boards = gather(load_cluster("ethernet"), [rows_file(tmp_path, 8, 64)])  # PCIe boards
    assert boards.fit is not None
    assert boards.fit.evidence == "same stack"
    assert boards.sources[0].endswith("; on a100, the cluster has A100-PCIe-80GB")
    with pytest.raises(DataError, match="contradict each other"):
        gather(cluster, [rows_file(tmp_path, 8, 64, 50.0)])


def test_measurements_of_other_machines_are_refused(tmp_path: Path) -> None:
    step, links = tmp_path / "step.json", tmp_path / "links.json"
    step.write_text(step_times_text(dataclasses.replace(TIMES, device="cpu")), encoding="utf-8")
    with pytest.raises(
        ConfigError, match="was measured on cpu, cluster 'abci' computes on V100-SXM2-16GB; measure there"
    ):
        gather(load_cluster("abci"), [str(step)])
    gather(load_cluster("stampede2"), [str(step)])  # a cluster of CPUs
    step.write_text(step_times_text(dataclasses.replace(TIMES, device="NVIDIA A100-SXM4-80GB")), encoding="utf-8")
    gather(load_cluster("dgx-a100"), [str(step)])
    with pytest.raises(ConfigError, match="was measured on NVIDIA A100-SXM4-80GB, cluster 'abci'"):
        gather(load_cluster("abci"), [str(step)])
    axes = (AxisCost(3e-4, 1.6e8, name="column", size=2), AxisCost(1e-3, 4e8, name="row", size=2))
    links.write_text(calibration_text(Calibration("2x2", 1, "gloo", axes)), encoding="utf-8")
    with pytest.raises(ConfigError, match="was measured with gloo, cluster 'abci' communicates with nccl; measure"):
        gather(load_cluster("abci"), [str(links)])


def test_a_run_alone_is_enough(tmp_path: Path) -> None:
    found = gather(load_cluster("this-machine"), [str(make_run(tmp_path / "a"))])
    # 8 ghosts of 64 on 4 workers: two passes each.
    ((batch, seconds),) = found.cluster.compute.points
    assert batch == 64
    assert seconds == pytest.approx(0.1)
    assert found.cluster.compute.backward_share == pytest.approx(0.6)
    assert found.layers is not None
    assert found.layers[0].name == "conv1"
    assert found.sources == ("run a: step time of resnet8 at 64 images, n = 6 (cpu, 4 workers)",)
    with pytest.raises(ConfigError, match="was measured on cpu, cluster 'abci'"):
        gather(load_cluster("abci"), [str(tmp_path / "a")])


def test_a_run_without_layers_needs_them_from_elsewhere(tmp_path: Path) -> None:
    old = str(make_run(tmp_path / "a", layers=None))
    with pytest.raises(DataError, match=r"does not tell the layers of resnet8 .* add --calibrate step.json"):
        gather(load_cluster("this-machine"), [old])
    (tmp_path / "step.json").write_text(step_times_text(TIMES), encoding="utf-8")
    found = gather(load_cluster("this-machine"), [str(tmp_path / "step.json"), old])
    assert found.layers == TIMES.layers
    assert found.cluster.compute.source == "run 'a'"
    assert [line.partition(":")[0] for line in found.sources] == ["step.json", "run a"]
    known = str(make_run(tmp_path / "b", layers=None, recipe="mikami2018"))
    assert gather(load_cluster("this-machine"), [known]).layers is None  # resnet50 is stored


@pytest.mark.parametrize("text", ["{}", "[]", "no"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        gather(laboratory(), [str(tmp_path / "x.json")])
    with pytest.raises(ConfigError, match="cannot be read"):
        gather(laboratory(), [str(tmp_path / "none.json")])


LAYERS = [{"name": "conv1", "parameters": 176, "work": 0.25}, {"name": "fc", "parameters": 650, "work": 0.75}]


def make_run(folder: Path, *, layers: Any = LAYERS, recipe: str = "demo", num_steps: int = 11) -> Path:
    """A run of 4 workers that computes 8 ghost batches of 64 in 0.2 s a step, slower at first; not finished."""
    folder.mkdir()
    config = load_config(recipe, ["train.ghost_batch_size=64"])
    (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    environment = {"workers": 4, "device": "cpu"} | ({"layers": layers} if layers is not None else {})
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    rows = [
        {"step": index + 1, "global_batch_size": 512, "compute_seconds": seconds, "backward_seconds": 0.6 * seconds}
        for index, seconds in enumerate([9.0] * 5 + [0.2] * (num_steps - 5))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return folder


def from_run(folder: Path) -> Evidence:
    return gather(load_cluster("this-machine"), [str(folder)])


def test_the_median_of_a_ghost_batch_size(tmp_path: Path) -> None:
    found = from_run(make_run(tmp_path / "a"))
    table = found.cluster.compute
    assert (table.model, table.points[0][0], found.cluster.measured_workers) == ("resnet8", 64, 4)
    assert table.points[0][1] == pytest.approx(0.1)
    assert table.backward_share == pytest.approx(0.6)
    assert table.noise == 0.0
    assert "n = 6 " in found.sources[0]
    assert found.layers is not None
    assert [layer.parameters for layer in found.layers] == [176, 650]


@pytest.mark.parametrize("layers", ["x", [1], [{"name": "a"}], [{"name": "a", "parameters": 0, "work": 1.0}], []])
def test_layers_that_cannot_be_are_none(tmp_path: Path, layers: Any) -> None:
    assert from_run(make_run(tmp_path / "a", layers=layers, recipe="mikami2018")).layers is None


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(MegabatchError) as caught:
            from_run(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    (tmp_path / "docs").mkdir()
    assert "is no run folder, it has no config.toml" in refused(tmp_path / "docs")
    folder = make_run(tmp_path / "a")
    (folder / "metrics.jsonl").write_text('{"step": 1}\nx\n', encoding="utf-8")
    assert "is damaged in line 2" in refused(folder)
    (folder / "metrics.jsonl").write_text('{"step": 1, "compute_seconds": null}\n' * 99, encoding="utf-8")
    assert "0 timed steps" in refused(folder)
    (folder / "metrics.jsonl").unlink()
    assert "does not exist" in refused(folder)
    (folder / "environment.json").write_text('{"workers": "x"}', encoding="utf-8")
    assert "how many workers" in refused(folder)
    (folder / "environment.json").write_text("{", encoding="utf-8")
    assert "damaged" in refused(folder)
    (folder / "config.toml").write_bytes(b"\xff")
    assert "cannot be read" in refused(folder)
    assert "2 timed steps after its first 5; at least 3" in refused(make_run(tmp_path / "b", num_steps=7))
