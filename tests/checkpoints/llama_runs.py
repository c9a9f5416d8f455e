"""Runs that begin with a Llama, Mistral, Mixtral or Qwen in transformers' layout: what their tests share."""
import json
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.checkpoints.huggingface_config import CONFIG, LAYOUTS, read_config
from mpi_impl.comm.topology import Place
from mpi_impl.generation.decoding import last_logits
from mpi_impl.generation.replica import trained_replica
from mpi_impl.launching.pool import RankFailure
from mpi_impl.programs.arguments import parse
from reference.batches import GPTBatch
from reference.models.gpt import gpt_tensors
from reference.params import leaves
from tests.cases import close
from tests.checkpoints.gpt2_golden import direction
from tests.checkpoints.gpt2_runs import options, trainer_of, whole_gradients
from tests.checkpoints.llama_golden import DECAY, GOLDEN, RATE, TOKENS
from tests.training_theorems import connected, dealt

GOLDEN_MODELS = json.loads(GOLDEN.read_text())
OF_STEPS = ["--lr", str(RATE), "--lr-decay-style", "constant", "--weight-decay", str(DECAY), "--adam-eps", "1e-8"]


class Learnt(NamedTuple):
    """One rank's results with the model in a folder, before some steps and after them."""

    place: Place
    loss: float
    logits: Any      # [s, V] of the first sequence, on the last stage's ranks
    grads: Any       # of the first step, and
    after: Any       # the weights after the last, as trees
    tensors: Any

    @property
    def steps(self) -> "Learnt":
        """Return the same with the weights in the place of the gradients."""
        return self._replace(grads=self.after)


def learn_on(group, folder, more, batches) -> Learnt:
    """Return a rank's results: logits of the first sequence, [B, s + 1], token by token from the KV cache; the loss of
    the first batch and its gradients; and the weights after a step on each batch.
    """
    argv = [*options(folder, more), *OF_STEPS, "--seq-length", str(batches[0].shape[1] - 1), "--global-batch-size",
            str(len(batches[0]))]
    settings = parse(argv, group.size)
    with connected(group, settings.parallel) as topology:
        trainer = trainer_of(settings, topology)
        replica, tokens = trained_replica(trainer), batches[0][0]
        kv_cache, logits = replica.empty_kv_cache(len(tokens)), []
        for n in range(len(tokens) - 1):
            logits.append(last_logits(replica, [tokens[n:n + 1].tolist()], kv_cache))
        results, found = [], []
        for batch in batches:
            results.append(trainer.step(dealt(trainer, 1, GPTBatch.unpack(batch)), len(batch)).loss)
            found.append(trainer.state.whole(trainer.state.gradients.own).copy())
        layout, weights = trainer.state.layout, trainer.state.whole(trainer.state.optimizer_states["parameters"])
        return Learnt(topology.place, results[0], logits, layout.views(found[0]), layout.views(weights),
                      layout.tensors)


def is_refused(ranks, folder, config: dict, sentence: str):
    """Check that a run which begins with the folder's model ends with this sentence if its config.json is another."""
    (folder / CONFIG).write_text(json.dumps(config))
    try:
        ranks.run(1, learn_on, folder, "", [np.array(TOKENS)])
    except RankFailure as failure:
        assert sentence in str(failure)
    else:
        raise AssertionError(f"no rank has said: {sentence}")


def model_of(folder):
    settings = parse(options(folder), 1)
    return settings.model(read_config(folder, "gpt")["vocab_size"])


def equal_golden(found: list[Learnt], golden, folder, e: int = 1):
    """Check ranks' logits, loss, gradients and weights after the steps, on batches of TOKENS."""
    for one in found:
        close(np.array(one.loss), np.array(golden["loss"]), 1e-13)
        if one.logits[0] is not None:
            close(np.concatenate(one.logits)[:, :golden["config"]["vocab_size"]], np.array(golden["logits"]), 1e-13)
    tensors = gpt_tensors(model_of(folder))
    for ranks_found, expected, tolerance in ((found, golden["gradients"], 1e-12),
                                             ([one.steps for one in found], golden["after"], 1e-9)):
        ours = in_their_layout(ranks_found, tensors, golden["config"]["model_type"], e)
        assert ours.keys() == expected.keys()
        for name, x in ours.items():
            along = (x * direction(name, golden["tensors"][name])).sum()
            close(np.array(along), np.array(expected[name]), tolerance)


def in_their_layout(ranks: list[Learnt], tensors, model_type: str, e: int = 1) -> dict[str, np.ndarray]:
    """Return the first replica's whole gradients, or what `steps` has put there, by transformers' names."""
    layout, found = LAYOUTS[model_type], {}
    declared = dict(leaves(tensors))
    for name, x in whole_gradients(ranks, e).items():
        for place in layout.places(name, declared[name], 0):
            part, there = place.shard_and_place(x, 0)
            found.setdefault(layout.full_name(place.name), np.zeros(place.shape))[there] = part
    return found
