"""Forward passes whose results are on the last stage.

ForwardPass gives the losses, with totals of 1. Here are passes that count the samples that a GPT has right, NaN if its
logits are not finite; and that keep a tuned BERT's logits.
"""
from typing import Any

import numpy as np

from mpi_impl.models.bert import answer_logits
from mpi_impl.models.gpt import predicted_tokens
from mpi_impl.parallel.passes import ForwardPass
from reference.models.stage import has_embedding, has_head
from reference.schedules.actions import Action
from shardlab.evaluate.lambada import words_right


class WordsPass(ForwardPass):
    """A pass over a ScoredBatch that gives the number of samples with all tokens right in place of the losses."""

    def forward(self, action: Action, x):
        params, batch = self.params[action.stage], self.microbatches[action.microbatch]
        y = predicted_tokens(batch.tokens if has_embedding(params) else x, params, self.model, self.region)
        if has_head(params, self.model):
            lost = (y >= self.model.vocab_size).any()      # no token has the largest logit: they are NaN
            self.losses += np.where(lost, np.nan, words_right(y == batch.targets, batch.weights))
            return None
        return y


class LogitsPass(ForwardPass):
    """A pass that keeps the logits of each microbatch's answers, by its number, on the last stage."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.logits: dict[int, Any] = {}

    def forward(self, action: Action, x):
        params, batch = self.params[action.stage], self.microbatches[action.microbatch]
        y = answer_logits(x, params, self.model, batch, self.region, self.contexts[action.microbatch])
        if has_head(params, self.model):
            self.logits[action.microbatch] = y
            return None
        return y
