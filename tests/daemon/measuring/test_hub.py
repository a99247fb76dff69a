"""Names of the Hub's nets: the folder here, the snapshot in the cache, and what is said where there is neither."""

import pytest

from benchd.daemon.config import LimitsConfig, Suite
from benchd.daemon.errors import NotAvailable, UsageError
from benchd.daemon.measuring import hub, plan, user_model
from benchd.daemon.measuring.plan import Machine

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    """A folder to be in, with a package of that name beside it and a cache in it."""
    (tmp_path / "site" / "transformers").mkdir(parents=True)
    (tmp_path / "site" / "transformers" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def net(folder, *files):
    folder.mkdir(parents=True)
    for name in ("config.json", *(files or ["model.safetensors"])):
        (folder / name).write_text("{}")
    return folder


def fetched(cache, name="org/net", commit=COMMIT):
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return net(repository / "snapshots" / commit)


def test_a_folder_here_comes_before_the_cache(at):
    cached = fetched(at / "cache" / "huggingface" / "hub")
    assert hub.folder("hf:org/net") == cached
    assert hub.folder("hf:org/net") != net(at / "org" / "net") == hub.folder("hf:org/net")


@pytest.mark.parametrize(("variable", "below"), [("HF_HOME", "hub"), ("HF_HUB_CACHE", ".")])
def test_the_cache_is_where_its_variables_say(at, monkeypatch, variable, below):
    monkeypatch.setenv(variable, str(at / "elsewhere"))
    cached = fetched(at / "elsewhere" / below)
    assert hub.folder("hf:org/net").resolve() == cached.resolve()


def test_what_was_not_fetched_names_the_command_that_does(at):
    with pytest.raises(NotAvailable, match=r"^hf:org/net: not a folder here, and not .*: hf download org/net$"):
        hub.folder("hf:org/net")
    fetched(at / "cache" / "huggingface" / "hub", "org/half", "../../../elsewhere")
    with pytest.raises(NotAvailable, match="hf download org/half"):
        hub.folder("hf:org/half")


@pytest.mark.parametrize(
    "text", ["hf:", "hf:a/b/c", "hf:../net", "hf:/abs/net", "hf:org/..", "hf:org/net@main", "hf:-x"]
)
def test_a_path_out_of_here_is_no_name(text):
    with pytest.raises(UsageError, match="expected hf:ORG/NAME"):
        hub.folder(text)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (("pytorch_model.bin",), "does not load pickles"),
        (("model.safetensors", "adapter_config.json"), "this is an adapter"),
    ],
)
def test_a_folder_that_could_not_be_loaded_safely_is_refused(at, files, why):
    net(at / "mine", *files)
    with pytest.raises(UsageError, match=why):
        hub.folder("hf:mine")


def test_without_the_package_one_line_says_what_to_install(at, monkeypatch):
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(NotAvailable, match="pip install transformers"):
        hub.folder("hf:org/net")


def test_it_is_a_model_by_name_a_module_and_the_model_of_a_suite(at):
    net(at / "org" / "net")
    own = user_model.module("hf:org/net", ["input_ids=int64:16:0-9"])
    assert (own.model, own.named.path, own.named.folder) == ("hf:org/net", "hf:org/net", "")
    machine = Machine("cpu", has_cxx=True)
    for suite in (Suite(models=["hf:org/net"]), Suite(module="hf:org/net")):
        cases = [entry.case for entry in plan.plan([suite], LimitsConfig(), machine)]
        assert {case.case_id for case in cases} >= {"hf_org_net,eager,b1", "hf_org_net,onnxruntime,b1"}
        assert {case.model for case in cases} == {"hf:org/net"}
    with pytest.raises(UsageError, match="must be the only model"):
        plan.plan([Suite(models=["hf:org/net", "square"])], LimitsConfig(), machine)
