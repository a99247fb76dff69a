"""Nets of the Hub by their AutoModel, tiny ones made and saved here without a network: `make test-hub`.

BENCHD_HUB names a folder that the packages are installed into where they are absent.
"""

import json

import numpy as np
import packages
import pytest
import torch
from worker_jobs import changed, job, run_here

packages.installed("BENCHD_HUB", "test-hub", *packages.HUB)
import transformers  # noqa: E402

from benchd.daemon.errors import UnfitModel  # noqa: E402
from benchd.daemon.records import UserModule, Variant  # noqa: E402
from benchd.models import hub_net  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the package
VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 16}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
LAYERS = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 8, 8]}
NETS = {
    "vit": ("ForImageClassification", VIT | {"patch_size": 8}, {"pixel_values": [3, 16, 16]}, ["logits"]),
    "resnet": (
        "ForImageClassification",
        LAYERS | {"embedding_size": 8, "layer_type": "basic"},
        {"pixel_values": [3, 224, 224]},
        ["logits"],
    ),
    "yolos": (
        "ForObjectDetection",
        VIT | {"patch_size": 8, "image_size": [16, 16], "num_detection_tokens": 4},
        {"pixel_values": [3, 16, 16]},
        ["logits", "pred_boxes"],
    ),
    "segformer": (
        "ForSemanticSegmentation",
        LAYERS | {"num_attention_heads": [1, 1, 1, 1], "decoder_hidden_size": 8},
        {"pixel_values": [3, 224, 224]},
        ["logits"],
    ),
    "audio-spectrogram-transformer": (
        "ForAudioClassification",
        VIT | {"patch_size": 8, "max_length": 32, "num_mel_bins": 16},
        {"input_values": [32, 16]},
        ["logits"],
    ),
    "wav2vec2": (
        "ForCTC",
        BERT
        | {
            "conv_dim": [8, 8],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
        {"input_values": [16000]},
        ["logits"],
    ),
    "bert": ("", BERT, {"input_ids": [126], "attention_mask": [126]}, ["last_hidden_state"]),
    "distilbert": (
        "ForSequenceClassification",
        {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "vocab_size": 50},
        {"input_ids": [128], "attention_mask": [128]},
        ["logits"],
    ),
}


def saved(folder, kind):
    task, sizes, _, _ = NETS[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    if kind == "bert":
        config.max_position_embeddings = 128
    net = getattr(transformers, f"AutoModel{task}").from_config(config)
    net.save_pretrained(folder)
    return net.eval()


def hub_job(tmp_path, kind, **fields):
    saved(tmp_path / kind, kind)
    a_job = job(tmp_path, model=f"hf:{kind}", **fields)
    from msgspec.structs import replace

    return replace(a_job, own=UserModule(f"hf:{kind}", [], str(tmp_path / kind)))


@pytest.mark.parametrize("kind", NETS)
def test_a_net_answers_as_itself_to_inputs_of_its_sizes(tmp_path, kind):
    _, _, inputs, answers = NETS[kind]
    outcome = run_here(hub_job(tmp_path, kind))
    assert (outcome.process.status, outcome.check.verdict) == ("ok", "passed"), outcome.process.reason
    assert {spec.name: spec.shape for spec in outcome.model.inputs} == inputs
    assert [text.partition(" ")[0] for text in outcome.check.outputs] == answers
    assert (outcome.model.weights, set(outcome.model.read)) == (kind, {"config.json", "transformers"})
    net = hub_net.build(tmp_path / kind)
    given = {name: torch.ones(2, *shape) for name, shape in inputs.items()}
    given = {name: value.long() if name.startswith(("input_ids", "att")) else value for name, value in given.items()}
    with torch.no_grad():
        ours, theirs = net(**given), saved(tmp_path / "again", kind)(**given)
    for name in answers:
        assert torch.equal(ours[name], theirs[name])


@pytest.mark.parametrize("kind", ["vit", "bert"])
@pytest.mark.parametrize("variant", ["onnxruntime", "openvino", "compile"])
def test_it_runs_as_a_file_and_compiled(tmp_path, kind, variant):
    outcome = run_here(hub_job(tmp_path, kind, variant=Variant.parse(variant)))
    assert (outcome.process.status, outcome.check.verdict) == ("ok", "passed"), outcome.process.reason


def test_images_are_prepared_as_its_processor_does(tmp_path):
    from PIL import Image

    saved(tmp_path / "vit", "vit")
    facts = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 24}, "do_resize": True}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(facts))
    net = hub_net.build(tmp_path / "vit")
    assert net.inputs == ["pixel_values=3x16x24"]
    red = net.preprocess(Image.fromarray(np.full((40, 30, 3), (255, 0, 0), np.uint8)))
    assert red.shape == (3, 16, 24)
    assert red[:, 0, 0].tolist() == pytest.approx([1.0, -1.0, -1.0])


def test_weights_that_the_checkpoint_lacks_are_not_made_up(tmp_path):
    saved(tmp_path / "net", "bert")
    config = json.loads((tmp_path / "net" / "config.json").read_text()) | {
        "architectures": ["BertForSequenceClassification"]
    }
    (tmp_path / "net" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnfitModel, match=r"lacks 2 weights of BertForSequenceClassification, such as classifier\.bias"):
        hub_net.build(tmp_path / "net")


def test_code_that_a_folder_brings_is_not_run(tmp_path):
    saved(tmp_path / "net", "bert")
    config = json.loads((tmp_path / "net" / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Net"}}
    (tmp_path / "net" / "config.json").write_text(json.dumps(config))
    (tmp_path / "net" / "mine.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        hub_net.build(tmp_path / "net")
    assert not (tmp_path / "mark").exists()


def test_a_metric_judges_it_on_items_of_its_names(tmp_path):
    (tmp_path / "task.py").write_text(
        "import torch\n\ndef items():\n"
        "    for place in range(6):\n"
        "        ids = torch.full((12,), place)\n"
        "        yield {'input_ids': ids, 'attention_mask': torch.ones_like(ids)}, place % 2\n\n"
        "def right(answers, targets):\n    return (answers['logits'].argmax(1) == targets).float().mean()\n"
    )
    metric_fields = {"samples": f"{tmp_path}/task.py:items", "metric": f"{tmp_path}/task.py:right", "accuracy": "full"}
    outcome = run_here(changed(hub_job(tmp_path, "distilbert"), **metric_fields))
    assert (outcome.accuracy.images, outcome.accuracy.metric) == (6, "right"), outcome.process.reason
    assert {spec.name: spec.shape for spec in outcome.model.inputs} == {"input_ids": [12], "attention_mask": [12]}
