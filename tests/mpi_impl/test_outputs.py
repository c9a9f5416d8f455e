"""No output takes the place of an input or of another output, by whatever name."""
import os
from argparse import Namespace

import pytest

from mpi_impl.runtime.outputs import check_outputs
from reference.errors import UserError


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Make a checkpoint, a model in Hugging Face's layout, a corpus and a tokenizer; each file holds its own name.
    Check in the end that none was changed.
    """
    names = ["run/latest_checkpointed_iteration.txt", "run/iter_0000003/manifest.json", "run/tokenizer.json",
             "run/metrics", "hf/config.json", "hf/model.safetensors", "hf/vocab.json", "corpus/a.txt",
             "corpus/trace.json", "pair.bin", "pair.idx", "tokenizer.json", "machine.toml", "plan.csv", "prompts"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    yield
    assert all((tmp_path / name).read_text() == name for name in names)


@pytest.mark.parametrize("options, says", [
    (dict(metrics_file="a", ledger="a"), "--metrics-file a is a file that --ledger writes"),
    (dict(metrics_file="a", ledger="./corpus/../a"), "--metrics-file a is a file that --ledger writes"),
    (dict(plot="t/timeline.png", trace="t"), "--plot t/timeline.png is a file that --trace writes in t"),
    (dict(metrics_file="r/iteration-1.rank-0.safetensors", record="r"), "that --record writes in r"),
    (dict(ledger="s/tokenizer.json", save="s"), "--ledger s/tokenizer.json is a file that --save writes in s"),
    (dict(ledger="h/config.json", save_hf="h"), "--ledger h/config.json is a file that --save-hf writes in h"),
    (dict(ledger="tokenizer.json", tokenizer_model="tokenizer.json"), "that --tokenizer-model reads"),
    (dict(metrics_file="hf/vocab.json", vocab_file="hf/vocab.json"), "that --vocab-file reads"),
    (dict(metrics_file="run/iter_0000003/manifest.json", load="run"), "that --load reads in run"),
    (dict(metrics_file="run/tokenizer.json", load="run/", save="run"), "that --save writes in run"),
    (dict(metrics_file="hf/model.safetensors", load_hf="hf"), "that --load-hf reads in hf"),
    (dict(metrics_file="corpus/a.txt", data_path="corpus/a.txt"), "that --data-path reads"),
    (dict(metrics_file="corpus/a.txt", data_path=["1", "pair", "2", "corpus"]), "that --data-path reads in corpus"),
    (dict(metrics_file="pair.idx", data_path=["pair"]), "that --data-path reads"),
    (dict(metrics_file="pair.bin", data_path=["pair.bin"]), "that --data-path reads"),
    (dict(trace="corpus", data_path=["corpus"]), "--trace corpus/trace.json is a file that --data-path reads"),
    (dict(save_hf="hf", load_hf="hf"), "--save-hf hf/.* is a file that --load-hf reads in hf"),
    (dict(save_hf="hf", vocab_file="hf/vocab.json"), "--save-hf hf/vocab.json is a file that --vocab-file reads"),
    (dict(metrics_file="machine.toml", hardware="machine.toml"), "that --hardware reads"),
    (dict(metrics_file="plan.csv", csv=["x", "plan.csv"]), "that --csv reads"),
    (dict(metrics_file="prompts", prompts_file="prompts"), "that --prompts-file reads"),
    (dict(report="a.html", ledger="a.html"), "--ledger a.html is a file that --report writes"),
    (dict(report=""), "--report is empty"),
    (dict(report="report"), "--report is 'report', but must be a file that ends in .html"),
    (dict(plot="losses"), "--plot is 'losses', but must be a file that ends in .png, .pdf, .svg"),
    (dict(trace="machine.toml"), "machine.toml is a file, where a folder is needed"),
    (dict(save_hf="caf\udce9"), "its name is not UTF-8"),
    (dict(save="d/" * 1900), "folders in one another is too deep"),
])
def test_an_output_that_cannot_be_is_a_sentence(files, options, says):
    """Every file stays as it was."""
    with pytest.raises(UserError, match=says):
        check_outputs(Namespace(**options))


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("output", ["metrics_file", "ledger"])
def test_a_link_to_an_input_is_that_input(files, link, output):
    link(os.path.abspath("tokenizer.json"), "linked")
    with pytest.raises(UserError, match="linked is a file that --tokenizer-model reads"):
        check_outputs(Namespace(**{output: "linked", "tokenizer_model": "tokenizer.json"}))
    os.symlink(os.path.abspath("run"), "other")
    with pytest.raises(UserError, match="manifest.json is a file that --load reads in other"):
        check_outputs(Namespace(**{output: "run/iter_0000003/manifest.json", "load": "other"}))


@pytest.mark.parametrize("options", [
    dict(load="run", save="run", metrics_file="run/metrics", plot="run/losses.png", ledger="run/ledger.json",
         trace="run", record="run"),
    dict(load_hf="hf", save_hf="model", metrics_file="hf/metrics", data_path=["corpus"], tokenizer_model=None),
    dict(save="run", load="run", tokenizer_model="run/tokenizer.json"),
    dict(data_path="corpus", metrics_file="corpus/new", offload_folder="corpus"), {}])
def test_what_people_do_is_not_refused(files, options):
    """All in one folder, beside the checkpoints that a run goes on from; and again, when the files are there."""
    for _ in range(2):
        check_outputs(Namespace(**options))
        for name in ("run/trace.json", "run/timeline.png", "run/recording.json", "run/losses.png"):
            if "trace" in options:
                open(name, "w").close()
