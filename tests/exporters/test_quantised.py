"""The int8 file: what is quantised how, what is refused, and that it is what it says."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="writes and reads files")
pytest.importorskip("onnxruntime.quantization.shape_inference", reason="quantises")

import onnxruntime as ort  # noqa: E402 - see above
from int8_made import feeds, images, net  # noqa: E402 - writes ONNX
from onnx import helper, numpy_helper  # noqa: E402

from benchd.exporters import calibrated, files, quantised, smoothing  # noqa: E402
from benchd.exporters.calibrated import CannotQuantise  # noqa: E402


def made(folder, target="cpu", *, given=None, **of_net):
    source, path = net(folder / "float.onnx", **of_net), folder / "int8.onnx"
    return quantised.quantise(
        source, path, given or feeds(32), target, {"benchd.precision": "int8"}, smooth=False
    ), path


def stored(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize(
    ("target", "zero", "kind", "largest"),
    [("cpu", 128, np.uint8, 127), ("avx2", 128, np.uint8, 64), ("arm", 0, np.int8, 127), ("tensorrt", 0, np.int8, 127)],
)
def test_a_file_is_symmetric_and_has_weights_per_channel_and_names_what_stays_float(
    tmp_path, target, zero, kind, largest
):
    quantisation, path = made(tmp_path, target)
    assert (quantisation.layers, quantisation.exact) == (["conv1", "conv2"], [])
    assert quantisation.left_fp32 == {"conv0": "first layer", "head": "last layer"}
    assert quantisation.agreeing == quantisation.images == 32
    assert 0 < quantisation.mean_error_share < 0.05
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 18}
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert about["benchd.precision"] == "int8"
    assert "last layer" in about["benchd.left_fp32"]
    initializers, makers = stored(model), {node.output[0]: node for node in model.graph.node}
    zeros = {initializers[node.input[2]].item() for node in model.graph.node if node.op_type == "QuantizeLinear"}
    assert zeros <= {zero, max(zero - 1, 0)}  # ONNX Runtime 1.23 puts the middle of 255 codes at 127
    for name in quantisation.layers:
        activation, weight = (makers[value] for value in next(n for n in model.graph.node if n.name == name).input[:2])
        assert initializers[activation.input[2]].dtype == kind
        assert initializers[weight.input[1]].shape == (8,)
        assert initializers[weight.input[0]].dtype == np.int8
        assert abs(initializers[weight.input[0]].astype(int)).max() == largest
        assert not initializers[weight.input[2]].any()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_file_for_this_cpu_runs_in_integers(tmp_path, monkeypatch, machine):
    monkeypatch.setattr(files.platform, "machine", lambda: machine)
    quantisation, path = made(tmp_path, files.quantised_for("cpu"))
    settings = ort.SessionOptions()
    settings.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    settings.add_session_config_entry("session.qdqisint8allowed", str(int(machine == "aarch64")))  # the default there
    ort.InferenceSession(path, settings, ["CPUExecutionProvider"])
    ran = [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]
    assert ran.count("QLinearConv") == len(quantisation.layers) == 2


def test_activations_on_a_grid_keep_it_exactly(tmp_path):
    quantisation, path = made(tmp_path, codes=True)
    assert quantisation.exact == quantisation.layers == ["conv1", "conv2"]
    model = onnx.load(path)
    initializers, makers = stored(model), {node.output[0]: node for node in model.graph.node}
    conv = next(node for node in model.graph.node if node.name == "conv1")
    assert initializers[makers[conv.input[0]].input[1]] == pytest.approx(0.3, rel=1e-6)


@pytest.mark.parametrize(
    ("names", "first", "quantised_ones"),
    [
        (["", "", "", ""], "Conv_0", ["Conv_2", "Conv_4"]),
        (["", "Conv_0", "", "Conv_4"], "Conv_0_", ["Conv_0", "Conv_4_"]),
    ],
)
def test_layers_without_a_name_get_one_of_their_own(tmp_path, names, first, quantised_ones):
    source, path = net(tmp_path / "float.onnx"), tmp_path / "int8.onnx"
    model = onnx.load(source)
    products = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    for node, name in zip(products, names, strict=True):
        node.name = name
    onnx.save(model, source)
    quantisation = quantised.quantise(source, path, feeds(32), "cpu", {}, smooth=False)
    assert quantisation.layers == quantised_ones
    assert list(quantisation.left_fp32.values()) == ["first layer", "last layer"]
    assert next(iter(quantisation.left_fp32)) == first
    assert quantisation.agreeing == 32


def test_without_a_layer_between_the_first_and_the_last_nothing_is_written(tmp_path):
    with pytest.raises(CannotQuantise, match="nothing to quantise: 2 products"):
        made(tmp_path, products=2)
    assert not (tmp_path / "int8.onnx").exists()


def test_activations_that_are_not_finite_are_refused(tmp_path):
    bad = feeds(32)
    bad[3]["x"][0, 0, 0, 0] = np.inf
    with pytest.raises(CannotQuantise, match="is not finite on the calibration images"):
        made(tmp_path, given=bad)
    assert not (tmp_path / "int8.onnx").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (images(1), "at least 16 images, not 1 "),
        (np.ones((32, 3, 8, 8), np.float32), "constant or all the same"),
        (np.repeat(images(1), 32, axis=0), "constant or all the same"),
        (np.ones((32, 4), np.bool_), "constant or all the same"),
        (np.ones(32, np.float32), "constant or all the same"),
        (np.full((32, 3, 8, 8), np.nan, np.float32), "not finite"),
    ],
)
def test_images_that_show_no_range_are_refused(given, message):
    with pytest.raises(CannotQuantise, match=message):
        calibrated.refuse_few(given, "these")


@pytest.mark.parametrize("given", [np.arange(32.0), np.arange(128).reshape(32, 4) % 3 == 0], ids=["number", "bool"])
def test_one_number_per_item_or_a_mask_shows_a_range(given):
    calibrated.refuse_few(given, "these")


def test_smoothing_leaves_the_answers_and_moves_the_outliers():
    draw = np.random.default_rng(0)
    weight = draw.normal(size=(16, 8)).astype(np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "projection")
    shapes = [helper.make_tensor_value_info(name, 1, [1, 5, size]) for name, size in (("x", 16), ("y", 8))]
    graph = helper.make_graph([node], "one", shapes[:1], shapes[1:], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    values = draw.normal(size=(20, 1, 5, 16)).astype(np.float32)
    values[..., 3] *= 50  # an outlier channel
    values[:, :, 4] *= 20  # and an outlier token
    given = [{"x": row} for row in values]
    before = [row["y"] for row in quantised.activations(model, ["y"], given)]
    scales = smoothing.smooth(model, list(model.graph.node), {"x": np.abs(values).max(axis=(0, 1))})
    assert list(scales) == ["projection_smoothed"]
    after = list(quantised.activations(model, ["y", "projection_smoothed"], given))
    np.testing.assert_allclose([row["y"] for row in after], before, rtol=1e-4, atol=1e-4)
    smoothed = np.stack([row["projection_smoothed"] for row in after])
    assert np.abs(smoothed).max() == pytest.approx(127 * scales["projection_smoothed"], rel=1e-5)
    assert np.ptp(np.log(np.abs(smoothed).max(axis=(0, 1, 2)))) < np.log(10)
    assert np.ptp(np.log(np.abs(values).max(axis=(0, 1, 2)))) > np.log(20)


def projections(path):
    """Write four projections of tokens (1, 5, 16), as Vim's."""
    draw = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", [f"x{place}", f"w{place}"], [f"x{place + 1}"], f"m{place}") for place in range(4)
    ]
    initializers = [
        numpy_helper.from_array(draw.normal(size=(16, 16)).astype("f") / 4, f"w{place}") for place in range(4)
    ]
    ends = [helper.make_tensor_value_info(name, 1, [1, 5, 16]) for name in ("x0", "x4")]
    graph = helper.make_graph(nodes, "tokens", ends[:1], ends[1:], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    onnx.save(model, path)
    return path, [{"x0": tokens} for tokens in draw.normal(size=(32, 1, 5, 16)).astype(np.float32)]


def test_smoothed_projections_take_one_pass_over_the_images(tmp_path, monkeypatch):
    source, given = projections(tmp_path / "float.onnx")
    passes, run = [], quantised.activations
    monkeypatch.setattr(
        quantised, "activations", lambda model, names, feeds: passes.append(names) or run(model, names, feeds)
    )
    quantisation = quantised.quantise(source, tmp_path / "int8.onnx", given, "cpu", {}, smooth=True)
    assert (quantisation.layers, passes) == (["m1", "m2"], [["x1", "x2"]])
    assert quantisation.mean_error_share < 0.05
    given[3]["x0"][:] = np.nan
    with pytest.raises(CannotQuantise, match="x1 is not finite on the calibration images"):
        quantised.quantise(source, tmp_path / "nan.onnx", given, "cpu", {}, smooth=True)


@pytest.mark.parametrize(
    ("flags", "overflows"), [("fma avx2 avx512f", True), ("avx2 avx512_vnni", False), ("avx2 avx_vnni", False)]
)
def test_without_vnni_products_of_bytes_overflow(tmp_path, flags, overflows):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n")
    assert files.overflows(tmp_path) is overflows
