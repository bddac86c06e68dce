"""Loading a tokenizer, without torch, and the ids that end an answer."""

import json
import subprocess
import sys

import pytest

from flashflow.errors import ConfigError
from flashflow.tokenizers import load_tokenizer, stop_ids
from tests.tiny_model import make_tiny_tokenizer


def saved(folder):
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_saved_tokenizer_encodes_as_before(tmp_path):
    text = "12 + 34 = <|im_end|>"
    tokenizer = load_tokenizer(saved(tmp_path))
    assert tokenizer.encode(text) == make_tiny_tokenizer().encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_loading_a_tokenizer_imports_no_torch(tmp_path):
    code = (
        "import sys; from flashflow.tokenizers import load_tokenizer, stop_ids; "
        f"t = load_tokenizer({str(saved(tmp_path))!r}); assert stop_ids(t, {str(tmp_path)!r}) == [2]; "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(("named", "expected"), [(2, [2]), ([0, 5], [0, 2, 5]), (7, [2, 7])])
def test_stop_ids_are_the_tokenizers_and_the_generation_configs(tmp_path, named, expected):
    (saved(tmp_path) / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert stop_ids(load_tokenizer(tmp_path), tmp_path) == expected


def test_a_model_without_an_end_of_sequence_is_refused(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path))
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="names no end of sequence"):
        stop_ids(tokenizer, tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no fast tokenizer"):
        load_tokenizer(tmp_path)
