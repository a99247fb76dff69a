"""Other people's code as they run it: the official path of Vim on stand-ins for its extensions, spikingjelly itself."""

import pytest
import torch

from benchd.exporters import code
from benchd.kernels.causal_conv1d import causal_conv1d
from benchd.kernels.selective_scan import selective_scan
from benchd.models.vim import Vim
from benchmarks import peers, rows
from benchmarks.ops import OPS
from benchmarks.peer_models import OfficialVim


class Extensions:
    """mamba-ssm's and causal-conv1d's functions by our equations; results lie in memory as theirs do.

    It notes what reached them: the memory that x and z lie in, and where B and C start.
    """

    def __init__(self):
        self.of_x, self.of_z, self.projected = [], [], []

    def convolve(self, x, weight, bias, activation):
        assert x.stride(-1) == 1
        self.of_x.append(x.untyped_storage().data_ptr())
        y = causal_conv1d(x.mT, weight, bias, activation, implementation="torch").mT
        return torch.empty_like(x).copy_(y)

    def scan(self, u, delta, A, B, C, D, z, delta_bias, delta_softplus):
        batch, _, length = u.shape
        assert B.is_contiguous()
        assert C.is_contiguous()
        for tensor in (u, delta, z):  # channels outermost: none was copied on its way
            assert tensor.stride() == (length, batch * length, 1)
        self.of_z.append(z.untyped_storage().data_ptr())
        self.projected.append((B.data_ptr(), C.data_ptr()))
        tensors = (u.mT, delta.mT, A, B.mT, C.mT, D, z.mT, delta_bias)
        y = selective_scan(*tensors, delta_softplus, implementation="torch").mT
        return torch.empty_like(z).copy_(y)

    def norm(self, x, weight, bias, residual, prenorm, residual_in_fp32, eps):
        assert bias is None
        assert residual_in_fp32
        total = x if residual is None else x + residual
        y = total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        return (y, total) if prenorm else y


def test_the_official_path_of_vim_is_our_vim_and_copies_nothing():
    torch.manual_seed(0)
    ours = Vim(24, 3, patch_size=8, stride=8, num_classes=7, image_size=24).double().eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    its = Extensions()
    official = OfficialVim(ours, its.scan, its.convolve, its.norm)
    images = torch.randn(2, 3, 24, 24, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(official(images), ours(images), rtol=1e-5, atol=1e-5)  # A and D are float32
    assert len(its.of_z) == 2 * 3
    assert its.of_x == its.of_z  # both are halves of one tensor


def test_the_official_mixer_is_ours_and_flips_once():
    torch.manual_seed(0)
    problem = OPS["conv_scan_gate"].make((2, 5, 6, 3, 2), torch.float64, torch.device("cpu"))
    its = Extensions()
    call = peers.official_mixer(problem.arguments, its.scan, its.convolve)
    for _ in range(2):
        torch.testing.assert_close(call(), problem.expected(), rtol=1e-6, atol=1e-6)
    assert its.of_x == its.of_z
    assert its.projected[:2] == its.projected[2:]  # nothing of them is made anew while the clock runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["lif", "lif_pool", "lif_pool_repeat", "stbif"])
def test_spikingjelly_computes_the_same_with_its_state_in_float32(op, dtype):
    pytest.importorskip("spikingjelly", reason="spikingjelly is a peer and no dependency")
    torch.manual_seed(0)
    problem = OPS[op].make((8, 2, 16, 16, 16), dtype, torch.device("cpu"))
    name = "spikingjelly STBIF" if op == "stbif" else "spikingjelly LIF"
    call = problem.peers[name](problem.arguments)
    for _ in range(2):
        spikes = call()
        assert spikes.dtype == dtype
        assert torch.equal(spikes, problem.expected())


def test_the_neurons_written_out_step_by_step_hand_on_values_too():
    torch.manual_seed(0)
    problem = OPS["stbif"].make((8, 2, 16, 16, 16), torch.float32, torch.device("cpu"))
    spikes = problem.peers["st-bif by torch steps"](problem.arguments)()
    assert spikes.unique().tolist() == [-0.5, 0, 0.5]
    assert torch.equal(spikes, problem.expected())


def test_every_package_that_a_peer_needs_is_told_with_its_version(tmp_path, monkeypatch):
    for package in ("mambapy", *peers.PACKAGES.values()):
        folder = tmp_path / f"{package.replace('-', '_')}-9.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(code, "_version", code._version.__wrapped__)  # what is kept of earlier tests
    assert {"mambapy", *peers.PACKAGES.values()} <= rows.versions().keys()


def test_a_peer_needs_only_packages_whose_versions_are_told():
    with pytest.raises(KeyError, match="somebodys_scan"):
        peers.required("somebodys_scan.ops")
