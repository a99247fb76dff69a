"""The page of the races: the winners whose answers are right, of each race the last, from the rows under results/."""

from pathlib import Path

import msgspec

from benchmarks import kernels, models, performance

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = ROOT / "docs/performance.md", ROOT / "docs/pictures/performance.svg"


def race(contender, ratio, **facts):
    facts = {"model": "vim_tiny", "batch_size": 4, "right": True, "is_peer": False, "median_ms": ratio} | facts
    return models.ModelTiming(
        device="NVIDIA H200",
        contender=contender,
        verdict="",
        ratio=ratio,
        versions={},
        options={},
        direction="inference",
        **facts,
    )


def kernel(contender, shape, ratio, **facts):
    facts = {"op": "lif", "dtype": "fp32", "right": True, "captured": False} | facts
    return kernels.OpTiming(
        device="NVIDIA H200",
        contender=contender,
        shape=shape,
        ratio=ratio,
        median_ms=ratio,
        bound_by="bytes",
        verdict="",
        versions={},
        **facts,
    )


def page(folder, *rows):
    for name, kind in (("models.jsonl", models.ModelTiming), ("kernels.jsonl", kernels.OpTiming)):
        lines = (msgspec.json.encode(row) + b"\n" for row in rows if isinstance(row, kind))
        (folder / name).write_bytes(b"".join(lines))
    return performance.page(folder)


def test_the_best_and_the_other_build_are_the_fastest_whose_answers_are_right(tmp_path):
    peer, amp, fp16 = "mamba-ssm", "mamba-ssm, amp", "mamba-ssm, fp16"
    rows = [race("eager", 1.0), race("custom-fp16", 0.1, right=False), race("custom", 0.25)]
    rows += [race("qann_resnet18/eager", 0.2), race(peer, 1.5, is_peer=True), race(amp, 1.0, is_peer=True)]
    text = page(tmp_path, *rows, race(fp16, 0.1, is_peer=True, right=False))
    assert "| vim_tiny | 4 | custom | 0.25 | 4 | mamba-ssm, amp | 4 |" in text


def test_without_eager_a_race_has_a_time_and_no_ratio(tmp_path):
    assert "| custom | 0.2 | - | - | - |" in page(tmp_path, race("custom", None, median_ms=0.2))


def test_a_race_that_nobody_of_ours_finished_rightly_is_left_out(tmp_path):
    assert "vim_tiny" not in page(tmp_path, race("custom", 0.2, right=False), race("mamba-ssm", 1.0, is_peer=True))


def test_of_repeated_races_the_last_one_stands(tmp_path):
    assert "| custom | 0.4 | 2.5 |" in page(
        tmp_path, race("eager", 1.0), race("custom", 0.5), race("eager", 1.0), race("custom", 0.4)
    )


def test_kernels_are_compared_at_their_largest_shape_with_the_fastest_other_that_is_right(tmp_path):
    text = page(
        tmp_path,
        kernel("benchd", [8, 1], 1.0),
        kernel("torch", [8, 1], 9.0),
        kernel("benchd", [8, 64], 1.0),
        kernel("spikingjelly", [8, 64], 1.5),
        kernel("torch", [8, 64], 1.2),
        kernel("wrong", [8, 64], 0.1, right=False),
        kernel("benchd", [8, 64], 0.2, captured=True),
        kernel("torch", [8, 64], 0.9, captured=True),
    )
    assert "median 1.2, from 1.2 (lif, fp32) to 1.2 (lif, fp32)." in text


def test_the_page_and_its_picture_are_made_of_the_records():
    assert PAGE.read_text() == performance.whole(ROOT / "results")
    assert PICTURE.read_text() == performance.picture(ROOT / "results")


def test_a_quarter_of_an_hour_has_its_rows_in_one_file(tmp_path):
    rows = [race("eager", 1.0), race("custom", 0.5), kernel("benchd", [8, 1], 1.0), kernel("torch", [8, 1], 2.0)]
    (tmp_path / "rows.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    text = performance.page(tmp_path)
    assert "| vim_tiny | 4 | custom | 0.5 | 2 |" in text
    assert "median 2," in text
