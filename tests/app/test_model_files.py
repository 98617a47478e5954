"""Which drafter a configuration means, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from lucevisor.api.contexts import ModelCard, ModelContext, SamplingDefaults
from lucevisor.api.parameters import sampling_params
from lucevisor.api.schemas import GenerationBody
from lucevisor.app.model_files import FamilyCard, card_files, find_card, open_model, open_tokenizer
from lucevisor.config import load
from lucevisor.errors import ConfigError, ExitCode
from lucevisor.model.families import FAMILIES
from lucevisor.protocol.loading import DraftKind
from lucevisor.text.template import ChatTemplate
from tests.another_user import as_nobody, needs_root, open_directory
from tests.api.scripted_model import metadata, tokenizer
from tests.model.drafter_files import (
    DFLASH2,
    DFLASH2_CONFIG,
    LUCEBOX,
    MTP,
    TARGET,
    UPSTREAM,
    checkpoint,
    copy,
    head_alone,
)


@pytest.fixture
def box(tmp_path):
    """Write a configuration with a group ``aside`` if the drafter is to run there; returns what it loads as."""

    def made(model: Path, draft: str, *overrides: str):
        aside = '[groups.aside]\nbackend = "cpu"\n' if "aside" in draft else ""
        path = tmp_path / "box.toml"
        path.write_text(
            f'[model]\npath = "{model}"\n[groups.left]\nbackend = "cpu"\n{aside}[placement]\n'
            f'target_devices = ["left:0"]\n[draft]\n{draft}\n'
        )
        return load(path, overrides)

    return made


def test_a_tokenizer_that_cannot_be_built_names_the_file(box, tmp_path):
    data = bytearray(TARGET.read_bytes())
    key = b"tokenizer.ggml.eos_token_id"
    at = data.index(key) + len(key) + 4
    data[at : at + 4] = b"\xff" * 4
    (tmp_path / "m.gguf").write_bytes(data)
    config = box(tmp_path / "m.gguf", "")
    with pytest.raises(ConfigError, match=r"m\.gguf.*eos_token_id = 4294967295 is not a token") as caught:
        open_tokenizer(config, open_model(config).spec)
    assert (caught.value.key, caught.value.exit_code) == ("model.path", ExitCode.USAGE)


def test_a_chat_template_of_the_configuration_takes_the_place_of_the_models_own(box, tmp_path):
    own = open_model(box(TARGET, ""))
    assert own.chat_template is None
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }} wörld")
    model = open_model(box(TARGET, "", "model.chat_template=chat.jinja"))
    assert model.metadata == {**own.metadata, "tokenizer.chat_template": "{{ messages[0].content }} wörld"}
    assert ChatTemplate.from_gguf(model.metadata).render([{"role": "user", "content": "Hi"}]).text == "Hi wörld"


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), (b"{% for %}", "line 1"), (b"\xff", "utf-8"), (b"{{ x | nosuch }}", "nosuch")],
)
def test_a_chat_template_that_cannot_be_used_is_refused_with_the_reason(box, tmp_path, content, words):
    if content is not None:
        (tmp_path / "chat.jinja").write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        open_model(box(TARGET, "", "model.chat_template=chat.jinja"))
    assert (caught.value.key, caught.value.exit_code) == ("model.chat_template", ExitCode.USAGE)


def kind_of(model) -> tuple[DraftKind, int] | None:
    drafter = model.drafter
    return None if drafter is None else (DraftKind(drafter.spec.model.architecture), drafter.spec.version)


@pytest.mark.parametrize(
    ("path", "draft", "used"),
    [
        (TARGET, "", False),  # it has none
        (MTP, "", True),
        (MTP, 'kind = "mtp"\nwidth = 2', True),
        (MTP, 'kind = "off"', False),
        (MTP, 'kind = "lookup"', False),
    ],
)
def test_a_head_of_the_models_file_is_used_unless_it_is_not_wanted(box, path, draft, used):
    model = open_model(box(path, draft))
    assert kind_of(model) == ((DraftKind.MTP, 1) if used else None)
    assert not used or model.drafter.files is model.spec.files


def test_a_path_comes_before_the_models_own_head(box, tmp_path):
    alone = head_alone(tmp_path / "mtp.gguf")
    assert open_model(box(MTP, f'path = "{alone}"')).drafter.files.paths == (alone,)


@pytest.mark.parametrize(("path", "version"), [(UPSTREAM, 1), (LUCEBOX, 1), (DFLASH2, 2)])
@pytest.mark.parametrize("kind", ["", 'kind = "dflash"\n'])
def test_a_drafter_is_read_as_what_it_is(box, path, version, kind):
    model = open_model(box(TARGET, f'{kind}path = "{path}"'))
    assert kind_of(model) == (DraftKind.DFLASH, version)
    assert model.drafter.files.paths == (path,)


def test_a_checkpoint_is_named_by_its_directory_or_its_weights(box, tmp_path):
    folder = checkpoint(tmp_path / "d", DFLASH2, DFLASH2_CONFIG)
    for path in (folder, folder / "model.safetensors"):
        model = open_model(box(TARGET, f'path = "{path}"'))
        assert kind_of(model) == (DraftKind.DFLASH, 2)
        assert model.drafter.files.paths == (folder / "config.json", folder / "model.safetensors")


@pytest.mark.parametrize(
    ("model", "draft", "key", "why"),
    [
        (TARGET, 'kind = "mtp"', "draft.kind", "has no MTP head"),
        (TARGET, 'path = "/nowhere/d.gguf"', "draft.path", "there is no such file"),
        (TARGET, f'path = "{TARGET}"', "draft.path", "has no MTP head"),
        (TARGET, f'kind = "dflash"\npath = "{MTP}"', "draft.path", "is not a DFlash drafter"),
        (MTP, f'kind = "mtp"\npath = "{UPSTREAM}"', "draft.path", "is of its model's family"),
        (TARGET, 'device = "aside:0"', "groups.aside", "no drafter to run"),
    ],
)
def test_a_drafter_that_cannot_be_read_is_refused(box, model, draft, key, why):
    with pytest.raises(ConfigError) as caught:
        open_model(box(model, draft))
    error = caught.value
    assert (error.key, error.exit_code) == (key, ExitCode.USAGE)
    assert why in error.why
    assert error.hint


def test_a_head_that_cannot_be_read_is_left_alone_unless_it_is_asked_for(box, tmp_path):
    two = copy(tmp_path / "two.gguf", MTP, keys={"qwen35.nextn_predict_layers": 2, "qwen35.block_count": 10})
    with capture_logs() as logs:
        assert open_model(box(two, "")).drafter is None
    (line,) = [line for line in logs if line["event"] == "the model's MTP head is not used"]
    assert "heads of more than one layer" in line["reason"]
    with pytest.raises(ConfigError, match="heads of more than one layer") as caught:
        open_model(box(two, 'kind = "mtp"'))
    assert caught.value.key == "draft.kind"


def test_a_device_without_a_drafter_is_told_of(box):
    with capture_logs() as logs:
        assert open_model(box(TARGET, 'device = "left:0"')).drafter is None
    assert [line["device"] for line in logs if line["event"] == "draft.device has no effect"] == ["left:0"]


@pytest.mark.parametrize("n_bytes", [0, 10, 100_000])
def test_a_file_that_is_cut_off_is_to_be_downloaded_again(box, tmp_path, n_bytes):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(TARGET.read_bytes()[:n_bytes])
    with pytest.raises(ConfigError) as caught:
        open_model(box(cut, ""))
    assert caught.value.hint == ""
    assert caught.value.why.endswith("download it again")
    assert str(cut) not in caught.value.why


def test_a_device_is_no_model_file(box):
    with pytest.raises(ConfigError, match="is not a regular file"):
        open_model(box(Path("/dev/null"), ""))


@needs_root
def test_a_file_that_this_user_may_not_read(box):
    with open_directory() as directory:
        secret = directory / "secret.gguf"
        secret.write_bytes(TARGET.read_bytes())
        secret.chmod(0o600)
        config = box(secret, "")
        with as_nobody(), pytest.raises(ConfigError) as caught:
            open_model(config)
    assert (caught.value.why, caught.value.hint) == (
        "cannot be read: Permission denied", "name a file that this user may read",
    )  # fmt: skip


# ---- defaults of families


def test_every_family_has_a_card():
    covered = {a for f in card_files() for a in msgspec.toml.decode(f.read_bytes(), type=FamilyCard).architectures}
    assert covered == set(FAMILIES)


@pytest.mark.parametrize(
    ("architecture", "name", "temperature", "direct"),
    [
        ("qwen3", "Qwen3 8B", 0.6, 0.7),
        ("qwen3moe", "Qwen3 Coder 30B A3B Instruct", 0.7, None),
        ("qwen3", "Qwen3-4B-Thinking-2507", 0.6, 0.7),
        ("qwen3next", "Qwen3 Next 80B A3B Instruct", 0.7, None),
        ("qwen3next", "Qwen3-Next-80B-A3B-Thinking", 0.6, 0.7),
        ("qwen3next", "Qwen3 Coder Next", 1.0, None),
        ("qwen3next", "Qwen3-Coder-Next", 1.0, None),
        ("qwen2", "Qwen2.5 Coder 0.5B Instruct AWQ", 0.7, None),
        ("llama", "Meta Llama 3.1 8B Instruct", 0.6, None),
        ("llama", "Mistral Small 3.2 24B Instruct 2506", 0.15, None),
        ("llama", "Mistral Nemo Instruct 2407", 0.3, None),
        ("llama", "Smollm2 135M 8k Lc100K Mix1 Ep2", 0.2, None),
        ("gemma3", "Gemma 3 270m", 1.0, None),
        ("qwen35", "Qwen3.5-27B", 1.0, 0.7),
        ("qwen35moe", "Qwen3.6 35B A3B", 1.0, 0.7),
        ("gemma4", "Gemma-4-31B-It", 1.0, None),
        ("laguna", "Laguna-XS.2", 1.0, None),
        ("mistral3", "Mistral Small 3.2 24B Instruct 2506", 0.15, None),
        ("mistral3", "Ministral 3 8B Instruct 2512", 0.15, None),
        ("mistral3", "Ministral 3 8B Reasoning 2512", 0.7, None),
        ("glm4moe", "GLM 4.5 Air", 1.0, None),
        ("gpt-oss", "Gpt Oss 20B", 1.0, None),
        ("glm4moe", "Glm-4.6", 1.0, None),
        ("granitemoe", "Granite 3.1 3b A800M Instruct", 0.0, None),
        ("granite", "Granite 3.3 8b Instruct", 0.0, None),
    ],
)
def test_a_model_finds_its_card(architecture, name, temperature, direct):
    card = find_card(architecture, {"general.name": name})
    assert card is not None
    assert card.sampling.temperature == temperature
    other = card.sampling_without_thinking
    assert (other and other.temperature) == direct


@pytest.mark.parametrize(
    ("architecture", "name"), [("qwen35", "lucevisor-demo-22m"), ("qwen3", ""), ("llama", "Qwen3")]
)
def test_other_models_have_none(architecture, name):
    assert find_card(architecture, {"general.name": name}) is None


def test_what_goes_before_what():
    card = find_card("qwen35", {"general.name": "Qwen3.5"})
    assert card is not None
    assert card.sampling_without_thinking is not None
    file = {"general.sampling.top_k": 40}
    defaults = SamplingDefaults.from_gguf(file, card.sampling)
    context = ModelContext(
        model=ModelCard(name="m", created_s=0), tokenizer=tokenizer(), template=None,
        defaults=defaults, direct_defaults=card.sampling_without_thinking,
    )  # fmt: skip

    def sampled(direct=False, structured=False, **asked):
        s = sampling_params(GenerationBody(**asked), context, 0, -1, direct=direct, structured=structured)
        return s.temperature, s.top_k, s.top_p, s.presence_penalty

    assert sampled() == (1.0, 40, 0.95, 1.5)
    assert sampled(direct=True) == (0.7, 20, 0.8, 1.5)
    assert sampled(seed=3, max_tokens=5, logit_bias={"1": 1.0}) == (1.0, 40, 0.95, 1.5)  # no shape of its own
    assert sampled(direct=True, temperature=0.1) == (0.1, 20, 0.8, 0.0)
    assert sampled(top_p=0.5) == (1.0, 40, 0.5, 0.0)
    assert sampled(repetition_penalty=1.1) == (1.0, 40, 0.95, 0.0)
    assert sampled(presence_penalty=0.3) == (1.0, 40, 0.95, 0.3)
    assert sampled(structured=True) == (1.0, 40, 0.95, 0.0)
    assert sampled(structured=True, presence_penalty=0.3) == (1.0, 40, 0.95, 0.3)


def test_stop_tokens_are_those_that_the_vocabulary_has():
    card = FamilyCard(architectures=["x"], name="", stop=["<|im_end|>", "<nowhere>", "the"])
    assert card.stop_ids(tokenizer()) == {tokenizer().token_id("<|im_end|>")}
    assert metadata()["general.architecture"] == "qwen35"


def test_a_card_that_is_wrong_is_refused():
    for text in (b'architectures = ["x"]', b'architectures = []\nname = ""\n[sampling]\ntemprature = 1'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.toml.decode(text, type=FamilyCard)
