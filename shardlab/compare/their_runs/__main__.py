"""Print the recorder for training programs of PyTorch: `shardlab recorder > shardlab_recorder.py`."""
from mpi_impl.launch.entry import ArgumentParser, run_alone
from shardlab.compare.their_runs import RECORDER


def main() -> None:
    parser = ArgumentParser(prog="shardlab recorder", description="Print a file that a training program of PyTorch "
                            "imports: it records what is computed, for `shardlab compare`. Redirect it to "
                            "shardlab_recorder.py.")
    parser.parse_args()
    print(RECORDER.read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    run_alone(main)
