"""What models are evaluated on: published data sets, read in their own formats, and what is measured on them.

scored.py         rows for a GPT: text of which some tokens are asked for
wikitext103.py    perplexity on WikiText-103, for each of its own words
lambada.py        how often the last word of a LAMBADA passage is known
race.py           rows for a BERT that chooses among RACE's four answers, and how often it is right
files.py          the files, or sentences about what is wrong with them

All of it is without ranks: a data set gives any rows that it is asked for, and a measure is a sum over samples.
"""
