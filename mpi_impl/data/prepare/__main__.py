from mpi_impl.data.prepare.preparation import main
from mpi_impl.launching.entry import run_alone

if __name__ == "__main__":
    run_alone(main)
