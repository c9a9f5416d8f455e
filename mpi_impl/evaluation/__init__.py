"""Models on published data sets, which are read in their own formats. The program is mpi_impl/evaluate.py.

scored.py         rows for a GPT: text of which some tokens are asked for
wikitext103.py    perplexity on WikiText-103, for each of its own words
lambada.py        how often the last word of a LAMBADA passage is known
race.py           rows for a BERT that chooses among RACE's four answers, and how often it is right
files.py          the files, or sentences about what is wrong with them

Those are without ranks: a data set gives any rows that it is asked for, and a measure is a sum over samples. On ranks:

passes.py         what is found out of each batch, where the last stage is
sums.py           the sum over all samples, of all replicas
zero_shot.py      a GPT on WikiText-103 or LAMBADA, as it is
pretrained.py     a BERT that is there already
fine_tuning.py    how it learns RACE, and what it then knows
options.py, arguments.py, telling.py     what is asked for, and what is told
"""
