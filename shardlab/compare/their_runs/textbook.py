"""The textbook's word on recordings: it computes their first step again, and names what differs from it.

    shardlab textbook MODEL recorded/one recorded/two         # MODEL: a folder with transformers' config.json
"""
import os
import sys

from mpi_impl.checkpoints.huggingface_config import CONFIG
from mpi_impl.launch.entry import ArgumentParser, run_alone
from shardlab.compare.their_runs import describe, read_run
from shardlab.compare.their_runs.differences import Comparison
from shardlab.compare.their_runs.frameworks import in_common_names
from shardlab.compare.their_runs.replay import replay

AT_LEAST = "float32"    # of transformers, whatever the model is in: the angles of rope, the logits


def main() -> None:
    parser = ArgumentParser(prog="shardlab textbook", description="Compute the first step of recordings again, with "
                            "the textbook in float64, and name the first tensor in which each differs from it.",
                            epilog="The exit status is 0 if all agree with the textbook, 1 if one differs, and 2 "
                            "if they cannot be compared.")
    parser.add_argument("model", metavar="MODEL", help="a folder with the model's config.json, as of transformers")
    parser.add_argument("recordings", metavar="RECORDING", nargs="+", help="a folder written by shardlab_recorder.py")
    options = parser.parse_args()
    folder = os.path.dirname(options.model) if os.path.basename(options.model) == CONFIG else options.model
    differ = []
    for name in options.recordings:
        run = read_run(name)
        both = in_common_names(replay(run, folder or "."), run)
        text, differs = describe(Comparison(*both, ("The textbook", name), AT_LEAST))
        print(text, end="\n\n" if name != options.recordings[-1] else "\n")
        differ.append(differs)
    sys.exit(int(any(differ)))


if __name__ == "__main__":
    run_alone(main)
