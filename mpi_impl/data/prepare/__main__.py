from mpi_impl.data.prepare.preparation import main
from mpi_impl.launch.entry import run_alone

if __name__ == "__main__":
    run_alone(main)
