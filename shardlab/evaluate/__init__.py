"""Evaluation on published data sets, which are read in their own formats. The program is `__main__.py`.

scored.py         rows for a GPT: text of which some tokens count
wikitext103.py    perplexity on WikiText-103, for each of its own words
lambada.py        accuracy on the last words of LAMBADA's passages
tuning_data.py    rows of two texts for a BERT that is tuned, and its accuracy
race.py           RACE: a passage, and a question with each of four answers
glue.py           MNLI and QQP: pairs of sentences, and their classes
squad.py          SQuAD: windows of a passage and the answer in them, F1 and exact match
tasks.py          the record of each task: what data, which model, which measure
files.py          reading of the files, or sentences about their faults

Those work without ranks: a data set gives any rows, and a measure is a sum over samples. On ranks:

passes.py         the measure of each batch, or its logits, on the last stage
sums.py           the sum over all samples, of all replicas
predictions.py    a tuned BERT's probabilities of all answers
zero_shot.py      a GPT, without training
pretrained.py     a pretrained BERT
fine_tuning.py    its fine-tuning, and its accuracy
protocol.py       the best of several rates, the median over several seeds, and ensembles
options.py, arguments.py     the options, and their checks
progress.py       reports of progress
"""
