"""The program that prepares a corpus: what is left of it, and that nothing of it depends on how the run went."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mpi_impl.data.indexed import IndexedDataset
from mpi_impl.data.prepare import preparation as program, progress
from mpi_impl.data.prepare.chunks import Part, documents
from mpi_impl.data.prepare.clean import normalize
from mpi_impl.data.prepare.near_duplicates import near_duplicates, signature
from mpi_impl.data.prepare.options import parse
from mpi_impl.data.prepare.preparation import Preparation, main, size_of
from mpi_impl.data.tokenizer import ByteLevelBPETokenizer
from reference.errors import UserError
from tests.launching import ROOT

WORDS = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in "rstz"]


def prose(seed, n):
    """Draw n words with a seed, in sentences of ten."""
    words = np.random.default_rng(seed).choice(WORDS, n)
    return " ".join(" ".join(words[i : i + 10]).capitalize() + "." for i in range(0, n, 10))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write JSON lines and texts with documents that are short, bad, or similar, across both."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": prose(seed, 120)}) for seed in range(40)]
    lines[5] = json.dumps({"text": prose(3, 120) + " Not quite."})
    lines[7:9] = ["{broken", ""]
    lines[11] = json.dumps({"text": "short"})
    lines[30] = json.dumps({"text": "\u00e9 \r\n" + prose(30, 120)})
    (folder / "a.jsonl").write_text("\n".join(lines))
    for seed in range(50, 60):
        (folder / f"b{seed}.txt").write_text(prose(seed, 120))
    (folder / "b57.txt").write_text(prose(12, 120))
    (folder / "b58.txt").write_bytes(b"")
    (folder / "b59.txt").write_bytes(b"\xff\xfe")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the file of a tokenizer that was trained before."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    ByteLevelBPETokenizer.train([prose(0, 2000)], 400).save(path)
    return str(path)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(program, "CHUNK", 2000)


def options(corpus, out, *more):
    return ["--input", str(corpus), "--output-prefix", str(out), "--workers", "1", *map(str, more)]


def read_files(out):
    """Return all files that a finished run has left: {suffix: bytes}."""
    return {path.name.removeprefix(out.name): path.read_bytes() for path in sorted(out.parent.glob(f"{out.name}.*"))}


@pytest.fixture(scope="module")
def whole(corpus, model, tmp_path_factory):
    """Return the files that an undisturbed run of one worker writes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "CHUNK", 2000)
        main(options(corpus, out, "--tokenizer-model", model))
    return read_files(out)


def step_by_step(corpus, tokenizer):
    """Prepare the corpus plainly: return the kept documents as [tokens], the dropped ones as {place: kind}."""
    texts = {f"{corpus}/a.jsonl:{number}": line for number, line in
             enumerate((corpus / "a.jsonl").read_text().split("\n"), start=1) if line}
    for place, line in texts.items():
        texts[place] = "" if line.startswith("{broken") else json.loads(line)["text"]
    texts |= {str(file): file.read_text(errors="ignore") for file in sorted(corpus.glob("*.txt"))}
    dropped = {f"{corpus}/a.jsonl:8": "bad JSON", f"{corpus}/b58.txt": "empty", f"{corpus}/b59.txt": "bad bytes"}
    left = {place: normalize(text) for place, text in texts.items() if place not in dropped}
    tokens = {place: [*tokenizer.encode(text), tokenizer.eod] for place, text in left.items()}
    dropped |= {place: "short" for place in left if len(tokens[place]) - 1 < 128}
    left = {place: text for place, text in left.items() if place not in dropped}
    duplicates = near_duplicates([np.stack(list(map(signature, left.values())), axis=1)], 0.7)
    dropped |= {place: "near-duplicate" for place, original in zip(left, duplicates.original) if original >= 0}
    return [tokens[place] for place in left if place not in dropped], dropped


def test_what_is_written_is_what_is_left(corpus, model, tmp_path, capsys):
    """Every document in order, without what is bad, short, or like an earlier one; and each of those is named."""
    main(options(corpus, tmp_path / "out", "--tokenizer-model", model))
    left, dropped = step_by_step(corpus, ByteLevelBPETokenizer.load(model))
    dataset = IndexedDataset(tmp_path / "out")
    assert [sequence.tolist() for sequence in dataset] == left and len(left) == 43
    lines = [json.loads(line) for line in (tmp_path / "out.dropped.jsonl").read_text().splitlines()]
    assert {line["document"]: line["dropped"] for line in lines} == dropped
    assert [line["document"] for line in lines] == sorted(dropped, key=lambda place: (
        place.split(":")[0], int(place.split(":")[1]) if ":" in place else 0))
    said = capsys.readouterr().out
    assert f"{corpus}/a.jsonl:6 is similar to {corpus}/a.jsonl:4: Jaccard 0.9" in said
    assert f"{corpus}/b57.txt is similar to {corpus}/a.jsonl:13: Jaccard 1.00" in said
    assert f"{corpus}/a.jsonl:8 is not a JSON object" in said and f"{corpus}/b58.txt is an empty file" in said
    assert "kept 43 of 49 documents" in said
    assert not (tmp_path / "out.preparing").exists()


@pytest.mark.parametrize("workers, chunk", [
    (1, 300), (1, 10**6), (2, 2000), pytest.param(3, 100, marks=pytest.mark.deep),
])
def test_neither_workers_nor_chunks_show_in_the_result(corpus, model, whole, tmp_path, monkeypatch, workers, chunk):
    """One, two, three processes; chunks smaller than a document, and one chunk."""
    monkeypatch.setattr(program, "CHUNK", chunk)
    monkeypatch.setattr(program, "CHUNKS", 10**6)
    main(options(corpus, tmp_path / "out", "--tokenizer-model", model, "--workers", workers))
    assert read_files(tmp_path / "out") == whole


def test_a_tokenizer_is_trained_on_the_corpus_and_saved_beside_it(corpus, tmp_path):
    """It is the one that the texts alone give, and with it the tokens are as when it is given."""
    main(options(corpus, tmp_path / "one", "--vocab-size", 300))
    saved = tmp_path / "one.tokenizer.json"
    assert ByteLevelBPETokenizer.load(saved).vocab_size == 300
    main(options(corpus, tmp_path / "two", "--tokenizer-model", saved))
    one, two = read_files(tmp_path / "one"), read_files(tmp_path / "two")
    assert one.pop(".tokenizer.json") and one == two


@pytest.mark.parametrize("share, every", [(1, 1), (0.99, 2), (0.5, 2), (0.3, 4)])
def test_of_a_large_corpus_a_tokenizer_is_trained_on_a_part(corpus, tmp_path, monkeypatch, capsys, share, every):
    """On every second chunk, every fourth, and so on: so many that they hold about TRAINED_ON bytes. The progress is
    that of the part.
    """
    run = Preparation(parse(options(corpus, tmp_path / "out")))
    monkeypatch.setattr(program, "TRAINED_ON", int(run.size * share))
    monkeypatch.setattr(progress, "REPEATED", 0)
    assert len(run.plan) > 8
    expected = [document.text for chunk in run.plan[::every] for part in chunk for document in documents(part)]
    assert list(run.texts("training")) == [text for text in expected if text]
    size = sum(part.stop - part.start for chunk in run.plan[::every] for part in chunk)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(run.plan[::every]) and said[-1].startswith(f"training: 100% of {size / 1e6:,.1f} MB")


def test_the_size_of_a_chunk_is_that_of_its_parts():
    assert size_of([Part("a", True, 10, 25), Part("a", True, 25, 26), Part("b", False, 0, 7)]) == 15 + 1 + 7


def interrupted_at(monkeypatch, k):
    """Interrupt the run after the k-th file or folder that it publishes. Return the calls so far."""
    calls = []

    def counting(publish):
        def until(*args):
            if len(calls) == k:
                raise KeyboardInterrupt
            calls.append(args)
            return publish(*args)
        return until

    monkeypatch.setattr(os, "replace", counting(os.replace))
    monkeypatch.setattr(Path, "rename", counting(Path.rename))
    return calls


def test_an_interruption_does_not_show_in_what_is_written(corpus, whole, tmp_path, monkeypatch, capsys):
    """Wherever it comes: before each of the files and folders that a run publishes, one after another."""
    command = options(corpus, tmp_path / "out", "--vocab-size", 300)
    main(options(corpus, tmp_path / "once", "--vocab-size", 300))
    for k in range(1000):
        with monkeypatch.context() as patch:
            interrupted_at(patch, k)
            try:
                main(command)
                break
            except SystemExit as left:
                assert left.code == 130
        if not k % 3:
            main(command)
            assert read_files(tmp_path / "out") == read_files(tmp_path / "once")
            for path in tmp_path.glob("out.*"):
                path.unlink()
    assert 10 < k < 100 and "Interrupted. The same command continues from here." in capsys.readouterr().err
    assert read_files(tmp_path / "out") == read_files(tmp_path / "once")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def replaced_by_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def with_another_number(path):
    """Change the number of documents in the report, which no longer fits the arrays."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"documents": 77}))


def with_a_word(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokens": "many"}))


@pytest.mark.parametrize("file, damage", [
    *((file, truncate) for file in ("tokens.bin", "tokens.idx", "places.npy", "signatures.npy", "report.json")),
    *((file, replaced_by_a_pipe) for file in ("tokens.bin", "places.npy", "report.json")),
    ("places.npy", lambda path: path.write_bytes(b"")), ("report.json", with_another_number),
    ("report.json", with_a_word), ("report.json", lambda path: path.write_text('{"lines": ' + "[" * 10**5))])
def test_what_is_done_is_not_done_again(corpus, model, whole, tmp_path, monkeypatch, capsys, file, damage):
    """But a chunk that was damaged is."""
    command = options(corpus, tmp_path / "out", "--tokenizer-model", model)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        interrupted_at(patch, 21)
        main(command)
    chunks = sorted((tmp_path / "out.preparing").glob("chunk-*"))
    damage(chunks[0] / file)
    encode_chunk, made = program.encode_chunk, []
    monkeypatch.setattr(program, "encode_chunk", lambda *args: made.append(args[0]) or encode_chunk(*args))
    main(command)
    said = capsys.readouterr().out
    assert f", and {len(chunks) - 1} chunks of {len(chunks) - 1 + len(made)} were done before" in said
    assert len(chunks) > 3
    assert chunks[0] in made and not {*chunks[1:]} & {*made}
    assert read_files(tmp_path / "out") == whole


PROGRAM = "import sys; from mpi_impl.data.prepare import preparation as p; p.CHUNK = 20_000; p.main(sys.argv[1:])"


def test_a_killed_run_goes_on_and_ends_the_same(model, tmp_path):
    """By SIGKILL, in the middle, with two workers: they end with it. The next run has another number of them."""
    texts = (json.dumps({"text": prose(seed % 500, 200)}) for seed in range(900))
    (tmp_path / "a.jsonl").write_text("\n".join(texts))
    out, more = tmp_path / "out", ["--tokenizer-model", model]
    command = [sys.executable, "-c", PROGRAM, *options(tmp_path / "a.jsonl", out, *more)]
    run = subprocess.Popen([*command, "--workers", "2"], cwd=ROOT, stdout=subprocess.DEVNULL)
    work = tmp_path / "out.preparing"
    while len(list(work.glob("chunk-*"))) < 8:
        assert run.poll() is None
        time.sleep(0.01)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert 8 <= len(list(work.glob("chunk-*"))) < 45 and not list(tmp_path.glob("out.bin"))
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    main(options(tmp_path / "a.jsonl", tmp_path / "once", *more))
    assert read_files(out) == read_files(tmp_path / "once")
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.parametrize("what", ["a.jsonl", "b58.txt", "b59.txt"])
def test_with_strict_the_first_bad_text_ends_the_run(corpus, model, tmp_path, what):
    """It is named with its line. Short ones and duplicates are not bad."""
    place = {"a.jsonl": "a.jsonl:8 is not a JSON", "b58.txt": "b58.txt is an empty", "b59.txt": "b59.txt is not UTF-8"}
    with pytest.raises(UserError, match=place[what]):
        main(options(corpus / what, tmp_path / "out", "--tokenizer-model", model, "--strict"))
    (tmp_path / "short.txt").write_text("short")
    fine = ["--input", tmp_path / "short.txt", corpus / "b50.txt", corpus / "b50.txt"]
    main(options(corpus, tmp_path / "fine", "--tokenizer-model", model, "--strict", *fine))


@pytest.mark.parametrize("more", [[], ["--split-sentences"]])
def test_a_document_of_just_as_many_tokens_as_asked_for_is_kept(corpus, model, tmp_path, more):
    """Its end is none of them."""
    main(options(corpus / "b50.txt", tmp_path / "out", "--tokenizer-model", model, *more))
    n = len(IndexedDataset(tmp_path / "out").tokens) - (not more)
    for least in n, n + 1:
        command = options(corpus / "b50.txt", tmp_path / f"{least}", "--tokenizer-model", model, *more)
        if least == n:
            main([*command, "--min-tokens", str(least)])
        else:
            with pytest.raises(UserError, match=f"has {n} tokens"):
                main([*command, "--min-tokens", str(least)])


def test_near_duplicates_and_short_documents_stay_where_that_is_asked(corpus, model, tmp_path):
    main(options(corpus, tmp_path / "out", "--tokenizer-model", model, "--jaccard", 0, "--min-tokens", 0))
    lines = [json.loads(line) for line in (tmp_path / "out.dropped.jsonl").read_text().splitlines()]
    assert {line["dropped"] for line in lines} == {"bad JSON", "empty", "bad bytes"}
    assert len(IndexedDataset(tmp_path / "out")) == 46


def test_sentences_keep_their_borders(corpus, model, tmp_path):
    """A document is as many sequences as it has sentences, and ends as they do."""
    main(options(corpus / "b50.txt", tmp_path / "out", "--tokenizer-model", model, "--split-sentences"))
    dataset, tokenizer = IndexedDataset(tmp_path / "out"), ByteLevelBPETokenizer.load(model)
    assert [tokenizer.decode(sentence) + " " for sentence in dataset] == [
        f"{sentence}. " for sentence in (corpus / "b50.txt").read_text().removesuffix(".").split(". ")]
    assert dataset.document_indices.tolist() == [0, 12]


@pytest.mark.parametrize("change, sentence", [
    (["--min-tokens", "64"], "was begun with --min-tokens 128, and now it is 64"),
    (["--split-sentences"], "was begun with --split-sentences False, and now it is True"),
    (["--vocab-size", "400"], "was begun with --vocab-size 300, and now it is 400"),
    ("touch", r"was begun with other texts: .*b50\.txt was added, removed or changed"),
    ("version", "was begun with another version"),
])
def test_other_options_and_other_texts_do_not_go_on_with_a_run(tmp_path, monkeypatch, change, sentence):
    """What has changed is named; without the folder the run begins anew."""
    (tmp_path / "in").mkdir()
    for seed in (50, 51):
        (tmp_path / "in" / f"b{seed}.txt").write_text(prose(seed, 120))
    command = options(tmp_path / "in", tmp_path / "out", "--vocab-size", 300)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        interrupted_at(patch, 3)
        main(command)
    if change == "touch":
        os.utime(tmp_path / "in" / "b50.txt", (0, 0))
    elif change == "version":
        monkeypatch.setattr(program, "VERSION", 99)
    with pytest.raises(UserError, match=sentence):
        main([*command, *(change if isinstance(change, list) else [])])


def test_folders_of_others_are_left_alone(corpus, model, tmp_path):
    """Whatever they are called."""
    for name in ("out.preparing.aside", ".shardlab-unfinished-", ".shardlab-unfinished-mine", "unfinished-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text(name)
        os.utime(tmp_path / name, (0, 0))
    main(options(corpus / "b50.txt", tmp_path / "out", "--tokenizer-model", model))
    assert sorted(path.parent.name for path in tmp_path.glob("*/mine")) == [
        ".shardlab-unfinished-", ".shardlab-unfinished-mine", "out.preparing.aside", "unfinished-mine"]


def test_what_is_written_takes_the_place_of_no_input(model, tmp_path):
    """Nor of a pipe or a folder; and that is said before the work."""
    (tmp_path / "out.dropped.jsonl").write_text(json.dumps({"text": prose(50, 120)}))
    with pytest.raises(UserError, match=r"--output-prefix .*out\.dropped\.jsonl is a file that --input reads"):
        main(options(tmp_path / "out.dropped.jsonl", tmp_path / "out", "--tokenizer-model", model))
    (tmp_path / "out.dropped.jsonl").rename(tmp_path / "in.jsonl")
    (tmp_path / "out.tokenizer.json").symlink_to(model)
    with pytest.raises(UserError, match=r"--output-prefix .*tokenizer\.json is a file that --tokenizer-model reads"):
        main(options(tmp_path / "in.jsonl", tmp_path / "out", "--tokenizer-model", model))
    os.mkfifo(tmp_path / "other.dropped.jsonl")
    with pytest.raises(UserError, match=r"other\.dropped\.jsonl cannot be written: it is a link to nowhere, a pipe"):
        main(options(tmp_path / "in.jsonl", tmp_path / "other", "--tokenizer-model", model))
    with pytest.raises(UserError, match="its name is not UTF-8"):
        main(options(tmp_path / "in.jsonl", tmp_path / "caf\udce9", "--tokenizer-model", model))


DEEP, WRONG = "[" * 10**5, '{"version": 1, "tokenizers": 2, "options": {}, "tokenizer": "", "sources": []}'


@pytest.mark.parametrize("content", ["x", "[]", "{}", DEEP, WRONG, None])
def test_a_work_folder_of_something_else_is_a_sentence(corpus, tmp_path, content):
    (tmp_path / "out.preparing").mkdir()
    if content is not None:
        (tmp_path / "out.preparing" / "plan.json").write_text(content)
    with pytest.raises(UserError, match="is not the folder of an interrupted preparation"):
        main(["--input", str(corpus), "--output-prefix", str(tmp_path / "out")])


@pytest.mark.parametrize("options, said", [
    (["--output-prefix", ""], "does not name a file"), (["--output-prefix", "folder/"], "does not name a file"),
    (["--output-prefix", "out", "--min-tokens", "-5"], "--min-tokens is -5, but must not be negative")])
def test_names_and_sizes_that_cannot_be_are_sentences(corpus, options, said):
    with pytest.raises(UserError, match=said):
        main(["--input", str(corpus), *options])


def test_options_that_cannot_be_are_sentences(corpus, model, tmp_path):
    """Before anything is read or written."""
    for more, sentence in (
        (["--workers", 0], "--workers 0 leaves nobody"), (["--jaccard", 1.5], "--jaccard 1.5 is out of range"),
        (["--jaccard", "nan"], "--jaccard: nan is not a finite number"),
        (["--input", "no/such"], "--input no/such does not"),
        (["--vocab-size", 3], "--vocab-size 3 is too small"), (["--tokenizer-model", "no/such"], "no/such"),
    ):
        with pytest.raises(UserError, match=sentence):
            main(options(corpus, tmp_path / "out", *more))
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="lies in the folder --input"):
        main(options(corpus, corpus / "out"))
    main(options(corpus / "b50.txt", tmp_path / "out", "--tokenizer-model", model))
    with pytest.raises(UserError, match=r"out\.bin exists"):
        main(options(corpus / "b50.txt", tmp_path / "out", "--tokenizer-model", model))


def test_a_corpus_of_which_nothing_is_left_is_a_sentence(corpus, model, tmp_path):
    """What was dropped is said, and named in its file; there are no tokens."""
    with pytest.raises(UserError, match=r"No document is left\.\ndropped 1 as short:\n.*b50\.txt has \d+ tokens\n"):
        main(options(corpus / "b50.txt", tmp_path / "out", "--tokenizer-model", model, "--min-tokens", 10**6))
    assert [path.name for path in tmp_path.iterdir()] == ["out.dropped.jsonl"]


def test_it_is_not_started_under_mpirun(corpus, tmp_path, monkeypatch):
    """Every rank would do all of the work, in the same place."""
    monkeypatch.setattr(program, "launched_rank_and_size", lambda: (0, 2))
    with pytest.raises(UserError, match="Start it without mpirun"):
        main(options(corpus, tmp_path / "out"))


def test_a_folder_that_cannot_be_written_is_a_sentence(corpus, model, tmp_path):
    """Here a file stands where it should be."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is a file, where a folder is needed"):
        main(options(corpus, tmp_path / "file" / "out", "--tokenizer-model", model))


def test_megatron_reads_what_is_written(corpus, model, tmp_path):
    """Its own reader finds the same documents, with and without borders of sentences."""
    reader = pytest.importorskip("megatron.core.datasets.indexed_dataset").IndexedDataset
    for out, more in (tmp_path / "whole", []), (tmp_path / "split", ["--split-sentences"]):
        main(options(corpus, out, "--tokenizer-model", model, *more))
        ours, theirs = IndexedDataset(out), reader(str(out))
        assert len(theirs) == len(ours) and theirs[0].dtype == ours[0].dtype
        assert all(np.array_equal(one, other) for one, other in zip(ours, theirs))
        assert theirs.document_indices.tolist() == ours.document_indices.tolist()
        assert theirs.sequence_lengths.tolist() == ours.sequence_lengths.tolist()
