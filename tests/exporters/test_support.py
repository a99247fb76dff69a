"""The table's check on real graphs: none of ours is blamed, and every planted fault is found at its node."""

import onnx
import onnx.parser
import pytest
import torch

from benchd.exporters.files import OPSET
from benchd.exporters.support import OnnxFileError, findings, tables
from benchd.models.catalog import build

BOTH = ("10.3", "11")


def graph(text, opset=20, functions=""):
    """Parse a graph in ONNX's own text format."""
    domains = f'"" : {opset}, "here" : 1'
    return onnx.parser.parse_model(f"<ir_version: 9, opset_import: [{domains}]>\n{text}\n{functions}")


LIF = """g (float[8,4] x, float[4] v0) => (float[4] v, float[8,4] s) {
  v, s = Scan <num_scan_inputs = 1, body = step (float[4] before, float[4] x_t) => (float[4] after, float[4] spike) {
    decay = Constant <value = float {0.95}> ()  one = Constant <value = float {1.0}> ()
    kept = Mul(before, decay)  charged = Add(kept, x_t)
    fired = GreaterOrEqual(charged, one)  spike = Cast <to = 1> (fired)
    removed = Mul(charged, spike)  after = Sub(charged, removed)
  }> (v0, x)
}"""
LOOP = """g (float[4] x) => (float[4] y, float[3,4] all) <int64 trips = {3}, bool go = {1}> {
  y, all = Loop <body = step (int64 i, bool c, float[4] a) => (bool d, float[4] b, float[4] o) {
    d = Identity(c)  b = Relu(a)  o = Identity(b)
  }> (trips, go, x)
}"""
CHOICE = """g (bool c, float[4] x) => (float[4] y) {
  y = If <then_branch = a () => (float[4] p) { p = Relu(x) }, else_branch = b () => (float[4] q) { q = Neg(x) }> (c)
}"""
SHAPES = """g (float[N,4,8] x) => (float[N,8] y, float[N,4,8] r) <
    int64[1] one = {1}, int64 axis = {1}, int64[1] two = {2}, int64[1] last = {-1},
    int64[1] low = {-9223372036854775807}> {
  k = Identity(one)  t = ReduceMean(x, k)  sum = CumSum(x, axis)  r = Slice(sum, last, low, two, last)
  a = Unsqueeze(t, k)  y = Squeeze(a, one)
}"""
QUANTISED = """g (float[4] x) => (float[4] y) <float scale = {0.5}, int8 zero = {0}> {
  q = QuantizeLinear(x, scale, zero)  y = DequantizeLinear(q, scale, zero)
}"""
BYTES = "g (uint8[4] x) => (uint8[4] y) { f = Cast <to = 1> (x)  h = Relu(f)  y = Cast <to = 2> (h) }"
CALL = "g (float[4] x) => (float[4] y) { y = here.Twice(x) }"
TWICE = '<domain: "here", opset_import: ["" : 20]> Twice (a) => (b) { b = Add(a, a) }'


@pytest.mark.parametrize("tensorrt", BOTH)
@pytest.mark.parametrize(
    "text", [LIF, LOOP, CHOICE, SHAPES, QUANTISED, BYTES], ids=["scan", "loop", "if", "shapes", "int8", "uint8"]
)
def test_good_graphs_have_no_findings(text, tensorrt):
    model = graph(text)
    onnx.checker.check_model(model, full_check=True)
    assert findings(model, tensorrt) == []


@pytest.mark.parametrize("tensorrt", BOTH)
def test_functions_are_looked_into(tensorrt):
    assert findings(graph(CALL, functions=TWICE), tensorrt) == []
    (found,) = findings(graph(CALL, functions=TWICE.replace("Add(a, a)", "Bernoulli(a)")), tensorrt)
    assert found.op == "Bernoulli"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Files of real models, as an exporter writes them."""
    folder = tmp_path_factory.mktemp("exported")
    for name in ("snn_onepass", "qann_resnet18"):
        model = build(name)
        image = torch.rand(1, *model.input_shape)
        program = torch.onnx.export(model, (image,), dynamo=True, opset_version=OPSET, verbose=False)
        program.save(folder / f"{name}.onnx")
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tensorrt", BOTH)
@pytest.mark.parametrize("name", ["snn_onepass", "qann_resnet18"])
def test_our_models_have_no_findings(exported, name, tensorrt):
    assert findings(exported / f"{name}.onnx", tensorrt) == []


def one(node, inputs="float[2,4,8,8] x", outputs="float[2,4,8,8] y", constants=""):
    return f"g ({inputs}) => ({outputs}) <{constants}> {{ {node} }}"


def in_scan(state, node):
    return f"""g (float[8,4] x, {state} v0) => ({state} v, float[8,4] s) {{
      v, s = Scan <num_scan_inputs = 1, body = b ({state} before, float[4] c) => ({state} after, float[4] o) {{
        {node}  o = Relu(c)
      }}> (v0, x)
    }}"""


# text, operator, part of the problem, tables, opset; every node is unnamed and known by its first output
FAULTS = {
    "unsupported": (one("y = Bernoulli(x)"), "y Bernoulli", "does not read it", BOTH, 20),
    "bitwise": (one("y = BitwiseAnd(x, x)", "int32[4] x", "int32[4] y"), "y BitwiseAnd", "does not read", BOTH, 20),
    "unique": (one("y = Unique(x)", "float[4] x", "float[N] y"), "y Unique", "does not read", BOTH, 20),
    "invented": (one("y = Relu(x) z = Sparkle(y)", outputs="float[2,4,8,8] z"), "z Sparkle", "not know it", BOTH, 20),
    "foreign": (one("y = here.Lif(x)"), "y Lif", "an operator of here", BOTH, 20),
    "int64 sum": (
        one("y = CumSum(x, a)", "int64[4] x", "int64[4] y", "int64 a = {0}"),
        "y CumSum",
        "INT64, where",
        BOTH,
        20,
    ),
    "sum axis": (one("y = CumSum(x, a)", "float[4] x, int64 a", "float[4] y"), "y CumSum", "input 1 (a)", BOTH, 20),
    "computed axis": (
        one("b = Add(a, a)  y = CumSum(x, b)", "float[4] x", "float[4] y", "int64 a = {0}"),
        "y CumSum",
        "stored in the file",
        ("10.3",),
        20,
    ),
    "double": (one("y = Exp(x)", "double[4] x", "double[4] y"), "y Exp", "DOUBLE", BOTH, 20),
    "cast to double": (one("d = Cast <to = 11> (x)  y = Cast <to = 1> (d)"), "d Cast", "DOUBLE", BOTH, 20),
    "uint8 inside": (one("u = Cast <to = 2> (x)  y = Cast <to = 1> (u)"), "u Cast", "UINT8 inside", BOTH, 20),
    "bool max": (one("y = Equal(x, x)", "bool[4] x", "bool[4] y"), "y Equal", "BOOL, where", BOTH, 20),
    "int power": (one("y = Pow(x, x)", "int64[4] x", "int64[4] y"), "y Pow", "INT64", ("10.3",), 20),
    "slice axes": (
        one("y = Slice(x, s, s, a)", "float[4] x, int64[1] s, int64[1] a", "float[N] y"),
        "y Slice",
        "input 3 (a) must be stored",
        ("10.3",),
        20,
    ),
    "pad axes": (
        one("y = Pad(x, p, , a)", "float[4] x, int64[2] p, int64[1] a", "float[N] y"),
        "y Pad",
        "input 3 (a)",
        ("10.3",),
        20,
    ),
    "squeeze axes": (
        one("y = Squeeze(x, a)", "float[1,4] x, int64[1] a", "float[4] y"),
        "y Squeeze",
        "input 1",
        BOTH,
        20,
    ),
    "reduce axes": (
        one("y = ReduceSum(x, a)", "float[4] x, int64[1] a", "float[1] y"),
        "y ReduceSum",
        "input 1",
        BOTH,
        20,
    ),
    "scatter add": (
        one('y = ScatterND <reduction = "add"> (x, i, u)', "float[4] x, int64[1,1] i, float[1] u", "float[4] y"),
        "y ScatterND",
        "attribute reduction",
        BOTH,
        20,
    ),
    "scatter none": (
        one('y = ScatterND <reduction = "none"> (x, i, u)', "float[4] x, int64[1,1] i, float[1] u", "float[4] y"),
        "y ScatterND",
        "attribute reduction",
        ("10.3",),
        20,
    ),
    "seed": (one("y = RandomUniformLike <seed = 3.0> (x)"), "y RandomUniformLike", "seed is ignored", BOTH, 20),
    "1d pool": (
        one("y = MaxPool <kernel_shape = [2]> (x)", "float[2,4,8] x", "float[2,4,7] y"),
        "y MaxPool",
        "3 dimensions",
        BOTH,
        20,
    ),
    "pool indices": (
        one("y, i = MaxPool <kernel_shape = [1, 1]> (x)"),
        "y MaxPool",
        "output 1 is not supported",
        BOTH,
        20,
    ),
    "pool dilations": (
        one("y = MaxPool <kernel_shape = [1, 1], dilations = [2, 2]> (x)"),
        "y MaxPool",
        "dilations = 2, 2",
        BOTH,
        20,
    ),
    "norm outputs": (
        one("y, m = LayerNormalization (x, w)", outputs="float[2,4,8,8] y", constants="float[8] w = {1,1,1,1,1,1,1,1}"),
        "y LayerNormalization",
        "output 1",
        BOTH,
        20,
    ),
    "cubic": (
        one('y = Resize <mode = "cubic"> (x, , s)', constants="float[4] s = {1,1,1,1}"),
        "y Resize",
        "mode = cubic",
        BOTH,
        20,
    ),
    "top 5000": (
        one("y, i = TopK(x, k)", "float[9000] x", "float[5000] y", "int64[1] k = {5000}"),
        "y TopK",
        "less than 3840",
        BOTH,
        20,
    ),
    "zero point": (
        one("q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)", constants="float s = {0.5}, int8 z = {3}"),
        "q QuantizeLinear",
        "input 2 must be zero",
        BOTH,
        20,
    ),
    "eye": (one("y = EyeLike(x)", "float[N,N] x", "float[N,N] y"), "y EyeLike", "static shape", BOTH, 20),
    "norm": (
        one("y = RMSNormalization(x, w)", "float[2,4] x, float[4] w", "float[2,4] y"),
        "y RMSNormalization",
        "only TensorRT 11",
        ("10.3",),
        23,
    ),
    "int state": (in_scan("int64[4]", "after = Add(before, before)"), "v Scan", "INT64, where", BOTH, 20),
    "bool state": (in_scan("bool[4]", "after = Not(before)"), "v Scan", "BOOL, where", BOTH, 20),
    "growing state": (
        in_scan("float[4]", "after = Concat <axis = 0> (before, before)").replace("float[4] after", "float[8] after"),
        "v Scan",
        "v0 [4] becomes [8]",
        BOTH,
        20,
    ),
    "no state": (
        """g (float[8,4] x) => (float[8,4] s) {
          s = Scan <num_scan_inputs = 1, body = b (float[4] c) => (float[4] o) { o = Relu(c) }> (x)
        }""",
        "s Scan",
        "without a state",
        ("10.3",),
        20,
    ),
    "in a Scan": (in_scan("float[4]", "after = Bernoulli(before)"), "v/body/after Bernoulli", "not read", BOTH, 20),
    "in a Loop": (LOOP.replace("Relu(a)", "Bernoulli(a)"), "y/body/b Bernoulli", "not read", BOTH, 20),
    "in an If": (CHOICE.replace("Neg(x)", "Bernoulli(x)"), "y/else_branch/q Bernoulli", "not read", BOTH, 20),
    "loop trips": (
        LOOP.replace("(float[4] x)", "(float[4] x, int64 n)")
        .replace("(trips, go, x)", "(n, go, x)")
        .replace("float[3,4]", "float[N,4]"),
        "y Loop",
        "length that is not known",
        BOTH,
        20,
    ),
    "while": (LOOP.replace("{3}", "{9223372036854775807}"), "y Loop", "length that is not known", BOTH, 20),
    "loop ends": (LOOP.replace("d = Identity(c)", "d = Not(c)"), "y Loop", "length that is not known", BOTH, 20),
    "growing loop": (
        LOOP.replace("b = Relu(a)  o = Identity(b)", "b = Concat <axis = 0> (a, a)  o = Relu(a)").replace(
            "float[4] b", "float[8] b"
        ),
        "y Loop",
        "x [4] becomes [8]",
        BOTH,
        20,
    ),
    "same names": (
        CHOICE.replace("(float[4] q) { q =", "(float[4] p) { p ="),
        "y If",
        "both branches name an output p",
        BOTH,
        20,
    ),
    "ranks": (
        CHOICE.replace(
            "float[4] q) { q = Neg(x)", "float[1,4] q) { i = Constant <value_ints = [0]> () q = Unsqueeze(x, i)"
        ).replace("(float[4] y)", "(float y)"),
        "y If",
        "differ in rank",
        BOTH,
        20,
    ),
    "two ways": (
        one(
            'y = GRU <direction = "bidirectional", hidden_size = 2, activations = ["Sigmoid", "Tanh", "Tanh", "Tanh"]>'
            "(x, w, r)",
            "float[3,1,4] x, float[2,6,4] w, float[2,6,2] r",
            "float[3,2,1,2] y",
        ),
        "y GRU",
        "backwards",
        BOTH,
        20,
    ),
}


def test_there_are_more_than_twenty_faults_for_each_table():
    assert all(sum(tensorrt in fault[3] for fault in FAULTS.values()) >= 20 for tensorrt in BOTH)


@pytest.mark.parametrize("tensorrt", BOTH)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found_at_its_node(fault, tensorrt):
    text, place, problem, in_tables, opset = fault
    found = findings(graph(text, opset), tensorrt)
    at_node = [
        one for one in found if f"{one.node.replace('node_of_', '')} {one.op}" == place and problem in one.problem
    ]
    assert bool(at_node) == (tensorrt in in_tables), found
    assert all(one.advice for one in found)


@pytest.mark.parametrize(
    ("opset", "wrong"), [(8, BOTH), (9, ()), (20, ()), (21, ("10.3",)), (24, ("10.3",)), (25, BOTH)]
)
def test_the_opset_of_the_file(opset, wrong):
    for tensorrt in BOTH:
        found = findings(graph(one("y = Relu(x)"), opset), tensorrt)
        assert [finding.op for finding in found] == ([f"opset {opset}"] if tensorrt in wrong else [])


def test_a_type_of_the_network_itself():
    (found,) = findings(graph("g (double[4] x, float[4] z) => (float[4] y) { y = Relu(z) }"), "10.3")
    assert (found.node, found.op) == ("x", "network input")
    assert "export in float32" in str(found)


def test_what_cannot_be_judged_is_said():
    text = "g (float[4] x) => (float[4] y) { k = Relu(nowhere)  y = Relu(x) }"
    (found,) = findings(graph(text), "11")
    assert found.node == "node_of_k"
    assert "cannot be told" in found.problem


def test_a_name_of_its_own_is_kept():
    model = graph(one("y = Bernoulli(x)"))
    model.graph.node[0].name = "encoder"
    assert findings(model, "11")[0].node == "encoder"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_a_damaged_file_is_named(tmp_path, share):
    content = graph(LIF).SerializeToString()
    (tmp_path / "net.onnx").write_bytes(content[: int(share * len(content))])
    with pytest.raises(OnnxFileError, match=r"net\.onnx: "):
        findings(tmp_path / "net.onnx", "11")


def test_no_file_and_no_model(tmp_path):
    with pytest.raises(OnnxFileError, match=r"net\.onnx: No such file"):
        findings(tmp_path / "net.onnx", "11")
    (tmp_path / "net.onnx").write_text("not a model at all, only text")
    with pytest.raises(OnnxFileError, match=r"net\.onnx: "):
        findings(tmp_path / "net.onnx", "11")


def test_a_node_without_its_inputs_or_body():
    model = graph(CHOICE)
    del model.graph.node[0].attribute[1]
    with pytest.raises(OnnxFileError, match="does not fit together"):
        findings(model, "11")


def test_the_tables_name_operators_and_variables_that_onnx_has():
    experimental = {"ImageScaler", "ParametricSoftplus", "ScaledTanh"}
    for tensorrt in BOTH:
        for op in tables().operators | tables().tables[tensorrt].operators:
            if op in experimental:
                continue
            row, schema = tables().row(op, tensorrt), onnx.defs.get_schema(op, 24)
            assert set(row.typed) <= {one.type_param_str for one in schema.type_constraints}, op
            assert tables().types(row.types), op
            indices = (*row.initializer, *row.constant, *row.zero, *row.below, *row.ranks, *row.static)
            assert all(index < len(schema.inputs) for index in indices), op
            assert set(row.attributes) <= schema.attributes.keys(), op


def test_every_standard_operator_of_opset_20_is_in_the_tables():
    known = {"", *tables().operators, *tables().tables["10.3"].operators, *tables().unsupported}
    known |= tables().tables["11"].operators.keys()
    standard = {one.name for one in onnx.defs.get_all_schemas() if one.domain == "" and one.since_version <= 20}
    assert {name for name in standard if not onnx.defs.get_schema(name, 20).deprecated} <= known
