"""Tokenizers of models' folders: transformers itself has written them, reads them, and says the same."""
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import Tokenizer

from mpi_impl.checkpoints.huggingface_tokenizer import own_tokenizer, read_folder
from mpi_impl.data.encode import encode_documents
from mpi_impl.data.huggingface_tokenizer import TOKEN_IDS
from mpi_impl.data.saved_tokenizer import load
from mpi_impl.data.tokenizer import END_OF_DOCUMENT, ByteLevelBPETokenizer, encode_whole
from tests.checkpoints.golden import KINDS, in_float64
from tests.checkpoints.runs import model_in
from tests.checkpoints.test_transformers import random_model
from tests.evaluate.runs import save
from tests.generate.test_generate import texts_printed

os.environ["HF_HUB_OFFLINE"] = "1"
ROWS, TEXT = 320, "the cat sat on the mat, and 1234 dogs don't sit. Grüße aus Köln, 東京!\n"
SPECIAL = [END_OF_DOCUMENT, "<s>", "</s>", "<eot>", "<new>"]
PIECES = [*TEXT.split(" "), " ", "\n", "🙂", "\N{COMBINING DIAERESIS}", "\ufffd", *SPECIAL]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=8).map("".join)
BYTES = ByteLevelBPETokenizer.train([TEXT] * 9, 300).library.to_str()
WORDS = json.loads(BYTES)["model"]
PAIRS = {"vocab": WORDS["vocab"], "merges": [tuple(pair) for pair in WORDS["merges"]]}
SENTENCES = {"vocab": {token: i for i, token in enumerate([
    "<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"acehost", "▁t", "he", "▁the", "at"])},
    "merges": [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "t")]}
MANY = list(range(0, ROWS, 9))
LARGER = {"vocab_size": ROWS, "max_position_embeddings": 64, "n_positions": 64}       # sizes
# transformers' class of the tokenizer, its arguments, the golden model, and the tokens that end a generated text
FAMILIES = {
    "gpt2": ("GPT2Tokenizer", PAIRS, "tied", 0), "qwen2": ("Qwen2Tokenizer", PAIRS, "Qwen2", None),
    "qwen3": ("Qwen2Tokenizer", PAIRS | {"eos_token": "<eot>", "extra_special_tokens": ["<s>"]}, "Qwen3", MANY),
    "qwen3_moe": ("Qwen2Tokenizer", PAIRS | {"split_special_tokens": True}, "Qwen3Moe", 0),
    "llama": ("LlamaTokenizer", SENTENCES, "Llama", MANY),
    "llama, whose class differs from its file": ("LlamaTokenizer", SENTENCES | {"legacy": True}, "Llama", 2),
    "llama between tokens": ("LlamaTokenizer", SENTENCES | {"add_bos_token": True, "add_eos_token": True}, "Llama", 2),
    "llama 3": ("TokenizersBackend", {"bos_token": "<s>", "eos_token": "<eot>", "add_bos_token": True}, "Llama", MANY),
    "mistral": ("TokenizersBackend", {"eos_token": "<eot>", "pad_token": END_OF_DOCUMENT}, "Mistral", 3),
    "mixtral": ("LlamaTokenizer", SENTENCES | {"add_bos_token": True}, "Mixtral", 2)}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, transformers, tmp_path_factory):
    """Return a family's folder, and what we and transformers read there. The files of older versions are there, too, as
    where such folders are published.
    """
    folder, (class_name, options, kind, ends) = tmp_path_factory.mktemp("family"), FAMILIES[request.param]
    model_class, config = KINDS[kind]
    larger = {name: LARGER[name] for name in LARGER.keys() & config.keys()}
    model = random_model(transformers, model_class, config | larger, 1)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    whole = {"tokenizer_object": Tokenizer.from_str(BYTES)} if class_name == "TokenizersBackend" else {}
    getattr(transformers, class_name)(**options, **whole).save_pretrained(folder)
    Tokenizer.from_file(str(folder / "tokenizer.json")).model.save(str(folder))
    if whole:
        config = json.loads((folder / "tokenizer_config.json").read_text()) | {"pad_token": "<new>"}
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": config.pop("eos_token")}}))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder, read_folder(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.lists(st.integers(0, ROWS - 1), max_size=9))
def test_ids_and_texts_are_transformers(pair, text, ids):
    """Control tokens, blanks, other alphabets, and what stands before and after a text."""
    _, ours, theirs = pair
    assert encode_whole(ours, text) == theirs(text).input_ids
    assert ours.encode_batch([text]) == [theirs.encode(text, add_special_tokens=False)]
    assert ours.decode(ids) == theirs.decode(ids)


def test_texts_begin_and_end_where_transformers_texts_do(pair, transformers, ranks, capfd):
    """Documents in training, and greedy texts, whose ends are any of several tokens."""
    folder, ours, theirs = pair
    document, = encode_documents([TEXT], own_tokenizer(str(folder)))
    ids, end = theirs(TEXT).input_ids, theirs.eos_token_id
    assert document.tolist() == ids + [end] * (ids[-1] != end)
    model = in_float64(transformers.AutoModelForCausalLM.from_pretrained(folder))
    inputs = theirs(PIECES[0] + " <s>", return_tensors="pt").input_ids
    text = model.generate(inputs, do_sample=False, max_new_tokens=16)[0].tolist()[len(ours.prefix):]
    if text[-1] in ours.ends:
        del text[-1]
    options = "--greedy", "--tokens-to-generate", 16, "--prompt", PIECES[0] + " <s>"
    assert texts_printed(ranks, capfd, 1, "--load-hf", folder, *options) == [theirs.decode(text)]


def test_a_model_is_saved_with_the_tokenizer_that_it_came_with(pair, transformers, ranks, tmp_path):
    """A tokenizer that is saved for transformers, or next to a checkpoint of ours, gives the same ids again."""
    folder, ours, theirs = pair
    (tmp_path / "hf").mkdir()
    ranks.run(1, save, model_in(folder, make_vocab_size_divisible_by=1), ours, tmp_path, tmp_path / "hf")
    again, saved = load(str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (again.fingerprint, again.eod, again.ends) == (ours.fingerprint, ours.eod, ours.ends)
    assert encode_whole(again, "".join(PIECES)) == saved("".join(PIECES)).input_ids == theirs("".join(PIECES)).input_ids
    assert saved.special_tokens_map == theirs.special_tokens_map
    for reader in transformers.GenerationConfig, transformers.AutoConfig:
        found, expected = (reader.from_pretrained(place) for place in (tmp_path / "hf", folder))
        for name in TOKEN_IDS:
            assert getattr(found, name) == getattr(expected, name)
