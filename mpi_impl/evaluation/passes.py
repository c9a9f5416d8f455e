"""What is found out about each batch on its way through the stages, and summed where the last one is.

The losses of what is asked for: that is ForwardPass, with totals of 1. Here: how many samples a model is right about;
no number, if what it gives is none.
"""
import numpy as np

from mpi_impl.evaluation.lambada import words_right
from mpi_impl.evaluation.race import answers_right
from mpi_impl.models.bert import choice_scores
from mpi_impl.models.gpt import predicted_words
from mpi_impl.parallel.passes import ForwardPass
from reference.models.stage import has_embedding, has_head
from reference.schedules.actions import Action


class WordsPass(ForwardPass):
    """Of a ScoredBatch: how many samples have all their words right, in the place of the losses."""

    def forward(self, action: Action, x):
        params, batch = self.params[action.stage], self.microbatches[action.microbatch]
        y = predicted_words(batch.tokens if has_embedding(params) else x, params, self.model, self.region)
        if has_head(params, self.model):
            lost = (y >= self.model.vocab_size).any()      # no word is the likeliest: the logits are no numbers
            self.losses += np.where(lost, np.nan, words_right(y == batch.targets, batch.weights))
            return None
        return y


class AnswersPass(ForwardPass):
    """Of a ChoiceBatch: how many questions are answered right, in the place of the losses."""

    def forward(self, action: Action, x):
        params, batch = self.params[action.stage], self.microbatches[action.microbatch]
        y = choice_scores(x, params, self.model, batch, self.region)
        if has_head(params, self.model):
            self.losses += np.where(np.isfinite(y).all(), answers_right(y, batch), np.nan)
            return None
        return y
