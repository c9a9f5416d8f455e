"""The program that prepares a corpus: what is left of it, and that nothing of it depends on how the run went."""
import json
import os
from pathlib import Path

import numpy as np
import pytest

from mpi_impl.data.indexed import IndexedDataset
from mpi_impl.data.prepare import preparation as program
from mpi_impl.data.prepare.clean import normalize
from mpi_impl.data.prepare.near_duplicates import near_duplicates, signature
from mpi_impl.data.prepare.preparation import main
from mpi_impl.data.tokenizer import ByteLevelBPETokenizer
from reference.errors import UserError

WORDS = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in "rstz"]


def prose(seed, n=120):
    """Draw n words with a seed, in sentences of ten."""
    words = np.random.default_rng(seed).choice(WORDS, n)
    return " ".join(" ".join(words[i : i + 10]).capitalize() + "." for i in range(0, n, 10))


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "CHUNK", 2000)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write JSON lines and texts with documents that are short, bad, or similar, across both."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = list(map(prose, range(40)))
    texts[5], texts[11], texts[30] = texts[3] + " Not quite.", "short", "\u00e9 \r\n" + texts[30]
    lines = [json.dumps({"text": text}) for text in texts]
    lines[7:9] = ["{broken", ""]
    (folder / "a.jsonl").write_text("\n".join(lines))
    for seed in range(50, 58):
        (folder / f"b{seed}.txt").write_text(prose(seed if seed < 57 else 12))
    (folder / "b58.txt").write_bytes(b"")
    (folder / "b59.txt").write_bytes(b"\xff\xfe")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the file of a tokenizer that was trained before."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    ByteLevelBPETokenizer.train([prose(0, 2000)], 400).save(path)
    return str(path)


def options(texts, out, *more):
    return ["--input", str(texts), "--output-prefix", str(out), "--workers", "1", *map(str, more)]


def read_files(out):
    """Return all files that a finished run has left: {suffix: bytes}."""
    return {path.name.removeprefix(out.name): path.read_bytes() for path in sorted(out.parent.glob(f"{out.name}.*"))}


@pytest.fixture
def prepare(model, tmp_path):
    """Return a function that prepares texts with this tokenizer, and returns where the results are."""
    def prepare(texts, *more, out="out"):
        main(options(texts, tmp_path / out, "--tokenizer-model", model, *more))
        return tmp_path / out

    return prepare


@pytest.fixture(scope="module")
def whole(corpus, model, tmp_path_factory):
    """Return the files that an undisturbed run of one worker writes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    main(options(corpus, out, "--tokenizer-model", model))
    return read_files(out)


def dropped_by(out):
    """Return the dropped documents in order: {place: kind}."""
    lines = map(json.loads, Path(f"{out}.dropped.jsonl").read_text().splitlines())
    return {line["document"]: line["dropped"] for line in lines}


def step_by_step(corpus, tokenizer):
    """Prepare the corpus plainly: return the kept documents as [tokens], the dropped ones as {place: kind}."""
    texts = {f"{corpus}/a.jsonl:{number}": json.loads(line)["text"] for number, line in
             enumerate((corpus / "a.jsonl").read_text().split("\n"), start=1) if line.startswith('{"')}
    texts |= {f"{corpus}/b{n}.txt": (corpus / f"b{n}.txt").read_text() for n in range(50, 58)}
    dropped = {f"{corpus}/a.jsonl:8": "bad JSON", f"{corpus}/b58.txt": "empty", f"{corpus}/b59.txt": "bad bytes"}
    left = {place: normalize(text) for place, text in texts.items()}
    tokens = {place: [*tokenizer.encode(text), tokenizer.eod] for place, text in left.items()}
    dropped |= {place: "short" for place in left if len(tokens[place]) - 1 < 128}
    left = {place: text for place, text in left.items() if place not in dropped}
    duplicates = near_duplicates([np.stack(list(map(signature, left.values())), axis=1)], 0.7)
    dropped |= {place: "near-duplicate" for place, original in zip(left, duplicates.original) if original >= 0}
    return [tokens[place] for place in left if place not in dropped], dropped


def test_what_is_written_is_what_is_left(corpus, model, prepare, capsys):
    """Every document in order, without what is bad, short, or like an earlier one; and each of those is named."""
    out = prepare(corpus)
    left, dropped = step_by_step(corpus, ByteLevelBPETokenizer.load(model))
    assert [sequence.tolist() for sequence in IndexedDataset(out)] == left and len(left) == 43
    named = dropped_by(out)
    assert named == dropped and list(named) == sorted(named, key=lambda place: (place.split(":")[0], len(place), place))
    said = capsys.readouterr().out
    assert f"{corpus}/a.jsonl:6 is similar to {corpus}/a.jsonl:4: Jaccard 0.9" in said
    assert "kept 43 of 49 documents" in said
    assert not Path(f"{out}.preparing").exists()


@pytest.mark.parametrize("workers, chunk", [(1, 10**6), (2, 900)])
def test_neither_workers_nor_chunks_show_in_the_result(corpus, prepare, whole, monkeypatch, workers, chunk):
    """One chunk, and chunks of about a document on two processes."""
    monkeypatch.setattr(program, "CHUNK", chunk)
    monkeypatch.setattr(program, "CHUNKS", 10**6)
    assert read_files(prepare(corpus, "--workers", workers)) == whole


def test_a_tokenizer_is_trained_on_the_corpus_and_saved_beside_it(corpus, tmp_path):
    """It is the one that the texts alone give, and with it the tokens are as when it is given."""
    main(options(corpus, tmp_path / "one", "--vocab-size", 300))
    saved = tmp_path / "one.tokenizer.json"
    assert ByteLevelBPETokenizer.load(saved).vocab_size == 300
    main(options(corpus, tmp_path / "two", "--tokenizer-model", saved))
    one, two = read_files(tmp_path / "one"), read_files(tmp_path / "two")
    assert one.pop(".tokenizer.json") and one == two


def interrupted_at(monkeypatch, k):
    """Interrupt the run after the k-th file or folder that it publishes."""
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


def test_an_interruption_does_not_show_in_what_is_written(corpus, tmp_path, monkeypatch, capsys):
    """Wherever it comes: before each of the files and folders that a run publishes, one after another."""
    monkeypatch.setattr(program, "CHUNK", 4000)
    command, out = options(corpus, tmp_path / "out", "--vocab-size", 300), tmp_path / "out"
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
            assert read_files(out) == read_files(tmp_path / "once")
            for path in tmp_path.glob("out.*"):
                path.unlink()
    assert 10 < k < 100 and "Interrupted. The same command continues from here." in capsys.readouterr().err
    assert read_files(out) == read_files(tmp_path / "once")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def count_more_documents(path):
    """Change the number of documents in the report, which no longer fits the arrays."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"documents": 77}))


@pytest.mark.parametrize("file, damage", [
    ("tokens.bin", truncate), ("places.npy", replace_by_a_pipe), ("report.json", count_more_documents)])
def test_what_is_done_is_not_done_again(corpus, prepare, whole, tmp_path, monkeypatch, capsys, file, damage):
    """But a chunk that was damaged is."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        interrupted_at(patch, 21)
        prepare(corpus)
    chunks = sorted((tmp_path / "out.preparing").glob("chunk-*"))
    damage(chunks[0] / file)
    encode_chunk, made = program.encode_chunk, []
    monkeypatch.setattr(program, "encode_chunk", lambda *args: made.append(args[0]) or encode_chunk(*args))
    assert read_files(prepare(corpus)) == whole
    assert f"{len(chunks) - 1} chunks of {len(chunks) - 1 + len(made)} were done before" in capsys.readouterr().out
    assert len(chunks) > 3 and {*chunks} & {*made} == {chunks[0]}


def test_with_strict_the_first_bad_text_ends_the_run(corpus, prepare, tmp_path):
    """It is named with its line. Short ones and duplicates are not bad."""
    with pytest.raises(UserError, match=r"a\.jsonl:8 is"):
        prepare(corpus / "a.jsonl", "--strict")
    (tmp_path / "short.txt").write_text("short")
    prepare(corpus, "--strict", "--input", tmp_path / "short.txt", corpus / "b50.txt", corpus / "b50.txt", out="fine")


@pytest.mark.parametrize("more", [[], ["--split-sentences"]])
def test_a_document_of_just_as_many_tokens_as_asked_for_is_kept(corpus, prepare, tmp_path, capsys, more):
    """Its end is none of them. Where nothing is left, what was dropped is reported and named; there are no tokens."""
    n = len(IndexedDataset(prepare(corpus / "b50.txt", *more)).tokens) - (not more)
    prepare(corpus / "b50.txt", *more, "--min-tokens", n, out="kept")
    with pytest.raises(UserError, match=rf"No document is left\.\ndropped 1 as short:\n.*b50\.txt has {n} tokens\n"):
        prepare(corpus / "b50.txt", *more, "--min-tokens", n + 1, out="none")
    assert [path.name for path in tmp_path.glob("none*")] == ["none.dropped.jsonl"]


def test_near_duplicates_and_short_documents_stay_where_that_is_asked(corpus, prepare):
    out = prepare(corpus, "--jaccard", 0, "--min-tokens", 0)
    assert {*dropped_by(out).values()} == {"bad JSON", "empty", "bad bytes"}
    assert len(IndexedDataset(out)) == 46


def test_sentences_keep_their_borders(corpus, model, prepare):
    """A document is as many sequences as it has sentences, and ends as they do."""
    dataset = IndexedDataset(prepare(corpus / "b50.txt", "--split-sentences"))
    assert [ByteLevelBPETokenizer.load(model).decode(sentence) + " " for sentence in dataset] == [
        f"{sentence}. " for sentence in (corpus / "b50.txt").read_text().removesuffix(".").split(". ")]
    assert dataset.document_indices.tolist() == [0, 12]


def test_other_options_and_other_texts_do_not_go_on_with_a_run(prepare, tmp_path, monkeypatch):
    """The refusal names what has changed; without the folder the run starts over."""
    texts = tmp_path / "in"
    texts.mkdir()
    (texts / "b50.txt").write_text(prose(50))
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        interrupted_at(patch, 3)
        prepare(texts)
    with pytest.raises(UserError, match="--min-tokens 128, and now it is 64"):
        prepare(texts, "--min-tokens", 64)
    os.utime(texts / "b50.txt", (0, 0))
    with pytest.raises(UserError, match=r"b50\.txt was"):
        prepare(texts)


def test_nothing_that_is_there_is_overwritten(corpus, model, prepare, tmp_path):
    """An input, the tokenizer, a pipe, earlier tokens; nor does the output lie among the inputs or below a file.
    And that is reported before the work.
    """
    (tmp_path / "out.dropped.jsonl").write_text("{}")
    (tmp_path / "mine.tokenizer.json").symlink_to(model)
    (tmp_path / "old.bin").touch()
    os.mkfifo(tmp_path / "pipe.dropped.jsonl")
    for texts, out, said in (
        (tmp_path / "out.dropped.jsonl", "out", "out.dropped.jsonl is a file that --input reads"),
        (corpus, "mine", "tokenizer.json is a file that --tokenizer-model reads"),
        (corpus, "pipe", "a pipe"), (corpus, "old", "old.bin exists"), (tmp_path, "below", "in the folder --input"),
        (corpus, "old.bin/out", "is a file"),
    ):
        with pytest.raises(UserError, match=said):
            prepare(texts, out=out)
        assert not list(tmp_path.glob("*.preparing"))


@pytest.mark.parametrize("name", ["plan.json", "mine.txt"])
def test_a_work_folder_of_something_else_is_refused(corpus, prepare, tmp_path, name):
    (tmp_path / "out.preparing").mkdir()
    (tmp_path / "out.preparing" / name).write_text("x")
    with pytest.raises(UserError, match="is not the folder of an interrupted preparation"):
        prepare(corpus)


def test_it_is_not_started_under_mpirun(corpus, prepare, monkeypatch):
    """Every rank would do all of the work, in the same place."""
    monkeypatch.setattr(program, "launched_rank_and_size", lambda: (0, 2))
    with pytest.raises(UserError, match="without mpirun"):
        prepare(corpus)


@pytest.mark.parametrize("more", [[], ["--split-sentences"]])
def test_megatron_reads_what_is_written(corpus, prepare, more):
    """Its own reader finds the same documents, with and without borders of sentences."""
    reader = pytest.importorskip("megatron.core.datasets.indexed_dataset").IndexedDataset
    out = prepare(corpus, *more)
    ours, theirs = IndexedDataset(out), reader(str(out))
    assert len(theirs) == len(ours) and theirs[0].dtype == ours[0].dtype
    assert all(np.array_equal(one, other) for one, other in zip(ours, theirs))
    assert theirs.document_indices.tolist() == ours.document_indices.tolist()
