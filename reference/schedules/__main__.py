"""Print a schedule: `python -m reference.schedules --schedule 1f1b -p 4 -m 8`."""
from reference.options import OptionParser
from reference.printing import run
from reference.schedules.actions import to_csv
from reference.schedules.generators import SCHEDULES, make
from reference.schedules.simulate import Times, activations_in_flight, simulate


def main(argv: list[str] | None = None) -> None:
    """Print a schedule, its bubble and its memory. Raises UserError for sizes that the schedule does not take."""
    parser = OptionParser(prog="reference.schedules", description=main.__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("-p", type=int, default=4, help="ranks of the pipeline")
    parser.add_argument("-m", type=int, default=8, help="microbatches")
    parser.add_argument("-v", type=int, default=None, help="stages on each rank, for interleaved and forward-only")
    parser.add_argument("--csv", action="store_true", help="print only the schedule, as CSV")
    options = parser.parse_args(argv)
    schedule = make(options.schedule, options.p, options.m, options.v)
    if options.csv:
        print(to_csv(schedule), end="")
        return
    v = schedule.stages // schedule.p
    timeline = simulate(schedule, Times(forward=1 / v, input_gradient=1 / v, weight_gradient=1 / v))
    print(schedule)
    print(f"\nWith F = I = W = 1 for a rank's layers and free communication: idle / ideal time "
          f"{timeline.bubble_fraction:.4g}, idle / longest span {timeline.bubble_rate:.4g}.")
    print(f"Activations of one stage, which is {f'1/{v} of' if v > 1 else 'all of'} a rank's layers, in flight on each "
          f"rank: {' '.join(map(str, activations_in_flight(schedule)))}.")


if __name__ == "__main__":
    run(main)
