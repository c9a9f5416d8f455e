"""Every MPI that Shardlab knows by name, and how they differ. The rest of this package asks here, or tries.

`shardlab doctor` tries what the installed one can do; `./run.sh test --mpi NAME` runs the tests on another one.
"""
from collections.abc import Mapping
from typing import NamedTuple


class Implementation(NamedTuple):
    """An MPI library with its launcher. The defaults are those of MPICH, from which most others are made."""

    name: str               # as mpi4py has it
    mark: str = ""          # a text in the --version of its launcher
    wheel: str = "mpich"    # the package by which pip installs it, or one that takes its place
    srun: str = "pmi2"      # `srun --mpi=...`: how its ranks find one another
    slots: str = ":"        # what stands between a host and its number of ranks in a machine file
    export: str = ""        # the option by which ranks on other hosts get a variable, where they don't get all
    settings: Mapping[str, str] = {}                        # variables for the launcher and its ranks
    fill_hosts: Mapping[str, str] = {}                      # by which all slots of a host are filled before the next
    here: Mapping[str, str] = {}                            # with which no batch system decides where ranks start
    yielding: Mapping[str, str] = {}                        # for ranks that have to share their cores
    ssh_options: tuple[str, ...] = ()                       # where the launcher looks for options of ssh,
    ssh_agents: tuple[str, ...] = ()                        # and where the user says how else hosts are reached
    host_files: tuple[str, ...] = ()                        # where the user names a file of hosts
    rank_and_size: tuple[str, str] = "PMI_RANK", "PMI_SIZE"     # where the launcher tells a process these
    local_size: str = "MPI_LOCALNRANKS"                     # and the number of ranks on its machine
    not_inherited: tuple[str, ...] = ()     # variables of a process that has called MPI, which mislead its launchers


MPICH = Implementation(
    "MPICH", "HYDRA",
    here={"HYDRA_RMK": "user", "HYDRA_LAUNCHER": "fork"},
    yielding={"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"},
    ssh_options=("HYDRA_LAUNCHER_EXTRA_ARGS",),
    ssh_agents=("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP"), host_files=("HYDRA_HOST_FILE",),
)
INTEL_MPI = Implementation(
    "Intel MPI", "Intel(R) MPI", "impi-rt",
    settings={"I_MPI_PIN": "off"},          # else the first ranks of all jobs share the first core
    here={"I_MPI_HYDRA_RMK": "user", "I_MPI_HYDRA_BOOTSTRAP": "fork"},
    yielding={"I_MPI_THREAD_YIELD": "3"},   # to sleep while it waits is ten times as fast as to spin, or to yield
    ssh_options=("I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS",),
    ssh_agents=("I_MPI_HYDRA_BOOTSTRAP",), host_files=("I_MPI_HYDRA_HOST_FILE",),
)
OPEN_MPI = Implementation(
    "Open MPI", "Open MPI", "openmpi", srun="pmix", slots=" slots=", export="-x",
    settings={
        "OMPI_ALLOW_RUN_AS_ROOT": "1",                              # as in a container; it asks for both
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # more ranks than cores, version 5
        "OMPI_MCA_rmaps_base_oversubscribe": "1",                   # and version 4
        "OMPI_MCA_osc": "^ucx",                                     # which complains, of memory shared on one machine
    },
    fill_hosts={
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
        "OMPI_MCA_rmaps_base_mapping_policy": "slot",
    },
    here={      # version 5, and version 4
        "PRTE_MCA_ras": "^slurm,pbs,lsf,gridengine", "PRTE_MCA_plm": "ssh",
        "OMPI_MCA_ras": "^slurm,tm,lsf,gridengine,alps", "OMPI_MCA_plm": "isolated",
    },
    ssh_options=("PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args"),
    ssh_agents=("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"),
    host_files=("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile"),
    rank_and_size=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    not_inherited=("OMPI_MCA_ess",),            # with it, mpiexec of version 4 ends without a message
)
MVAPICH = MPICH._replace(name="MVAPICH")

KNOWN = MPICH, INTEL_MPI, OPEN_MPI, MVAPICH
DEFAULT = MPICH         # what an environment gets for which nothing else is asked

# What its launcher was measured to need, for `dry_run --check-scale`: open files of mpiexec, and more for each host;
# those of its proxy on a host, and more for each rank. And the communicators that the library gives a process.
FILES, FILES_OF_A_HOST = 6, 4
PROXY_FILES, FILES_OF_A_RANK = 9, 4
COMMUNICATORS = 2048

# For ranks that have to share their cores. It is set before they know which MPI is theirs.
YIELDING = {name: value for mpi in KNOWN for name, value in mpi.yielding.items()}

# Systems with several MPIs tell their launchers apart by such endings.
LAUNCHER_NAMES = "mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi"

# What the names of files begin with that ranks on one machine share as memory, if they are named at all.
SHARED_MEMORY = "/dev/shm/mpich_shm_"


def names_signals(version: str) -> bool:
    """Report whether a launcher, by its --version, prints a banner whenever a rank dies by a signal."""
    return MPICH.mark in version


def implementation(library: str) -> Implementation:
    """Return what is known of an MPI, by its name, or its name and version. Of one that is not, any launcher may do."""
    return next((mpi for mpi in KNOWN if library.startswith(mpi.name)), Implementation(library))
