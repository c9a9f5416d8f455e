"""Batch systems: whether one starts the ranks, or its variables are set where it cannot be reached."""
import os
import shutil
from collections.abc import Mapping

from mpi_impl.runtime.rank_environment import environment_count

# The prefix of their variables, the program by which a launcher starts ranks, and the variable of a file of hosts.
BATCH_SYSTEMS = (("SLURM_", "srun", ""), ("PBS_", "ssh", "PBS_NODEFILE"), ("LSB_", "blaunch", ""),
                 ("SGE_", "qrsh", "PE_HOSTFILE"), ("PE_HOSTFILE", "qrsh", "PE_HOSTFILE"),
                 ("COBALT_", "ssh", "COBALT_NODEFILE"), ("LOADL", "poe", "LOADL_HOSTFILE"))


def suits_srun(ranks: int) -> bool:
    """Report whether these are ranks for srun: of a Slurm job on several nodes, or all of one on this node, which then
    get the signals that Slurm sends. Inside a step, such as an interactive shell, another would wait for its end.
    """
    return nodes_of_slurm() > 1 or "SLURM_STEP_ID" not in os.environ and environment_count("SLURM_NTASKS", 0) == ranks


def nodes_of_slurm() -> int:
    """Return the number of nodes of this Slurm job; 1 outside of Slurm, and where there is no srun to reach others."""
    return environment_count("SLURM_JOB_NUM_NODES", 1) if shutil.which("srun") else 1


def out_of_reach(environment: Mapping[str, str]) -> bool:
    """Report whether a batch system's variables are set, but its program or its file of hosts is missing, as in a
    container inside a job. Launchers would wait for them.
    """
    systems = [system for system in BATCH_SYSTEMS if any(name.startswith(system[0]) for name in environment)]
    return bool(systems) and not any(
        shutil.which(program) and (not file or os.path.exists(environment.get(file, "")))
        for _, program, file in systems)
