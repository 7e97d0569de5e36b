"""Launchers are known by their variables, which these tests take from the launchers' documentation and their output."""

import pytest

from paxtrain.errors import UserError
from paxtrain.process import launchers

TASK = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n[1-4]"}
SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
# `env` under mpiexec -n 2 of MPICH 5.0.2 and of Intel MPI 2021.18, and under mpirun -n 2 of Open MPI 5.0.11
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PRTE_LAUNCHED": "1",
}
OPEN_MPI_4 = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}
# torch/distributed/elastic/agent/server/local_elastic_agent.py
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1"}
# Kubeflow's trainer: pkg/runtime/framework/plugins/jax/jax.go; its training operator: pkg/controller.v1/jax/envvar.go
TRAINER = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "a-node-0-0.a:29500"}
OPERATOR = {"NUM_PROCESSES": "2", "PROCESS_ID": "1", "COORDINATOR_ADDRESS": "a-worker-0", "COORDINATOR_PORT": "6666"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}
SRUN_PMI = {"PMI_RANK": "1", "PMI_SIZE": "4"}  # srun --mpi=pmi2


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        (TASK, ("SLURM", 4, 1, None, True)),
        ({**TASK, **SRUN_PMI}, ("SLURM", 4, 1, None, True)),
        ({**TASK, **TORCHRUN}, ("SLURM", 4, 1, None, True)),  # a script for PyTorch
        ({**TASK, "JAX_COORDINATOR_ADDRESS": "n9:1"}, ("SLURM", 4, 1, "n9:1", True)),  # as jax has it
        (OPEN_MPI_4, ("Open MPI", 2, 1, None, True)),
        (OPEN_MPI, ("Open MPI", 2, 1, None, False)),
        ({**SHELL, **OPEN_MPI}, ("Open MPI", 2, 1, None, False)),  # mpirun in salloc
        ({**TASK, **OPEN_MPI}, ("Open MPI", 2, 1, None, False)),  # mpirun's daemons are tasks of a step
        (HYDRA, ("MPICH or Intel MPI", 2, 1, None, False)),
        ({**TASK, **HYDRA}, ("MPICH or Intel MPI", 2, 1, None, False)),
        (TORCHRUN, ("torchrun", 2, 1, None, False)),
        (TRAINER, ("a JAXJob", 2, 1, "a-node-0-0.a:29500", False)),
        ({**TRAINER, **POD}, ("a JAXJob", 2, 1, "a-node-0-0.a:29500", False)),
        (OPERATOR, ("a JAXJob", 2, 1, "a-worker-0:6666", False)),
        (POD, ("Kubernetes", None, None, None, True)),
    ],
)
def test_the_launcher_is_found_in_its_variables(environment, launch):
    assert launchers.detect(environment) == launch
    assert launchers.expected_processes(environment) == (launch[1] or 1)
    assert launchers.is_launched(environment)


@pytest.mark.parametrize(
    ("environment", "launched"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, True),  # the shell of sbatch
        ({**TASK, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "4", "SLURM_PROCID": "0"}, True),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, True),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, True),
        ({**SHELL, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, True),
        ({**SHELL, **HYDRA, "PMI_SIZE": "1"}, True),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, True),
        ({"WORLD_SIZE": "8"}, False),
        ({"NUM_PROCESSES": "8", "PROCESS_ID": "1"}, False),  # without a coordinator: of some other program
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({"JOB_COMPLETION_INDEX": "3"}, True),
    ],
)
def test_a_process_alone(environment, launched):
    assert launchers.detect(environment) is None
    assert launchers.expected_processes(environment) == 1
    assert launchers.is_launched(environment) == launched


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "abc"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "-1"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": ""},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1e9"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "9" * 5000},
        {"PMI_RANK": "0", "PMI_SIZE": "two"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "x"},
    ],
)
def test_a_launchers_variable_without_a_number_is_bad_input(wrong):
    *_, name = wrong
    with pytest.raises(UserError, match=f"the environment has {name}='.{{0,40}}', where the launcher puts a number"):
        launchers.detect({"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-4]", **wrong})


def of_slurm(per_node, **more):
    return {**TASK, "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_LOCALID": "2", "SLURM_NODEID": "1", **more}


@pytest.mark.parametrize(
    ("environment", "visible", "devices"),
    [
        ({}, "0,1", None),
        (of_slurm("1(x4)"), "0,1,2,3", [0, 1, 2, 3]),
        (of_slurm("1(x4)"), "", None),
        (of_slurm("1(x4)", JAX_LOCAL_DEVICE_IDS="0"), "0,1", None),
        (of_slurm("4(x4)"), "0,1,2,3", [2]),  # one of all that each task sees
        (of_slurm("1,4"), "0,1,2,3", [2]),  # the second node has four tasks
        (of_slurm("4,1"), "0,1,2,3", [0, 1, 2, 3]),
        (of_slurm("4(x4)"), "3", [0]),  # srun --gpus-per-task=1 or --gpu-bind=single:1
        (of_slurm("4(x4)", SLURM_GPUS_PER_TASK="4"), "4,5,6,7", [0, 1, 2, 3]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "5", [0]),
        (OPEN_MPI, "0,1", [1]),
        ({**OPEN_MPI, "SLURM_GPUS_PER_TASK": "1"}, "0,1", [1]),  # mpirun in an allocation sees the node's
        (HYDRA, "0,1", [1]),
        (TORCHRUN, "0,1", [1]),
        (TRAINER, "0,1", [0, 1]),
    ],
)
def test_gpus_of_a_process(environment, visible, devices):
    assert launchers.local_devices({**environment, "CUDA_VISIBLE_DEVICES": visible}) == devices
