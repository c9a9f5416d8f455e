"""Forward passes that measure each batch on the last stage.

ForwardPass gives the losses, with totals of 1. Here are passes that count the samples that a model has right, and give
NaN if its logits are not finite.
"""
import numpy as np

from mpi_impl.evaluate.lambada import words_right
from mpi_impl.evaluate.race import answers_right
from mpi_impl.models.bert import choice_scores
from mpi_impl.models.gpt import predicted_tokens
from mpi_impl.parallel.passes import ForwardPass
from reference.models.stage import has_embedding, has_head
from reference.schedules.actions import Action


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


class AnswersPass(ForwardPass):
    """A pass over a ChoiceBatch that gives the number of questions answered right in place of the losses."""

    def forward(self, action: Action, x):
        params, batch = self.params[action.stage], self.microbatches[action.microbatch]
        y = choice_scores(x, params, self.model, batch, self.region)
        if has_head(params, self.model):
            self.losses += np.where(np.isfinite(y).all(), answers_right(y, batch), np.nan)
            return None
        return y
