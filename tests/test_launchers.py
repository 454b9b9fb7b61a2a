"""Every launcher's row: by recorded environments, and for real where the launcher is installed."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from socket import gethostname

import pytest

import components
from instep import cli
from instep.distributed.identity import endpoints
from instep.distributed.identity.launchers import detect, endpoint
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import port_file, stores
from instep.errors import LaunchVariablesError, PortInUseError, RendezvousError
from launching import free_port

# Recorded on real ones: Open MPI 4.1.4, MPICH 4.0.2, Slurm 22.05.8; on one host Horovod 0.28.1.

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "264765441",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
ALLOCATION = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}
BATCH_SCRIPT = ALLOCATION | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = ALLOCATION | {
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "5",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "node[08-09]",
    "SLURM_CLUSTER_NAME": "lab",
}
HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}
SERVER = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "65358"}

# Written after the manuals of these; never run for real here.

JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}
INTEL_MPI = MPICH | {"I_MPI_HYDRA_HOST_FILE": "hosts"}
OTHER_PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "world"),
    [
        (OPEN_MPI, World(3, 4, 1, 2, 1, 2, "mpirun of Open MPI")),
        (MPICH, World(3, 4, 1, 2, 1, 2, "mpirun of MPICH or Intel MPI")),
        (INTEL_MPI, World(3, 4, 1, 2, 1, 2, "mpirun of MPICH or Intel MPI")),
        (SRUN, World(2, 3, 0, 1, 1, 2, "srun")),
        (HOROVODRUN, World(3, 4, 1, 2, 1, 2, "horovodrun")),
        (JSRUN, World(3, 4, 1, 2, 1, 2, "jsrun")),
        (OTHER_PMI, World(1, 2, 1, 2, 0, 1, "PMI_RANK and PMI_SIZE")),
    ],
)
def test_a_row_says_who_this_process_is(variables, world):
    assert detect(variables) == world


@pytest.mark.parametrize("variables", [ALLOCATION, BATCH_SCRIPT])
def test_a_salloc_shell_and_an_sbatch_script_are_no_rank(variables):
    assert detect(variables) == World()


@pytest.mark.parametrize(
    ("visible", "source"),
    [
        (SRUN | TORCHRUN, "torchrun"),
        (SRUN | MPICH | OPEN_MPI | HOROVODRUN, "horovodrun"),
        (SRUN | OPEN_MPI, "mpirun of Open MPI"),
        (OPEN_MPI | JSRUN, "jsrun"),
        (SRUN | MPICH, "mpirun of MPICH or Intel MPI"),
        (SRUN | OTHER_PMI, "srun"),  # srun --mpi=pmi2
        (MPICH | {"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE"),
        (SRUN | {"WORLD_SIZE": "3"}, "srun"),  # exported by the batch script
        (BATCH_SCRIPT | OPEN_MPI, "mpirun of Open MPI"),
    ],
)
def test_the_innermost_launcher_is_believed(visible, source):
    assert detect(visible).source == source


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "but not OMPI_COMM_WORLD_SIZE"),
        (without(MPICH, "PMI_RANK"), "found MPI_LOCALNRANKS=2, PMI_SIZE=4 but not PMI_RANK"),
        (without(SRUN, "SLURM_PROCID"), "found SLURM_STEP_ID=5, .* but not SLURM_PROCID"),
        (without(HOROVODRUN, "HOROVOD_SIZE"), "but not HOROVOD_SIZE"),
        (without(JSRUN, "JSM_NAMESPACE_SIZE"), "but not JSM_NAMESPACE_SIZE"),
        ({"PMI_RANK": "0"}, "but not PMI_SIZE"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "rank 4 of 4"),
        (MPICH | {"MPI_LOCALRANKID": "2"}, "local rank 2 of 2"),
        (MPICH | {"MPI_LOCALNRANKS": "0"}, "local rank 1 of 0"),
        (HOROVODRUN | {"HOROVOD_CROSS_RANK": "two"}, "HOROVOD_CROSS_RANK='two' is not a whole"),
        (SRUN | {"SLURM_NODEID": "2"}, "SLURM_STEP_TASKS_PER_NODE='2,1' does not say"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE='many'"),
        (SRUN | {"WORLD_SIZE": "8"}, "srun .*WORLD_SIZE=8, but SLURM_STEP_NUM_TASKS=3"),
        (OPEN_MPI | {"RANK": "0"}, "RANK=0, but OMPI_COMM_WORLD_RANK=3"),
    ],
)
def test_half_set_or_contradictory_variables_are_named(variables, message):
    with pytest.raises(LaunchVariablesError, match=message):
        detect(variables)


# ------------------------------------------------------------------------------ where they meet


def place(variables):
    return endpoint(detect(variables), variables)


def alone_on_host(variables):
    told = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0"}
    return variables | told


def test_ranks_of_srun_meet_at_the_first_host_of_the_step():
    found = place(SRUN)
    assert (found.host, found.port) == ("node08", 20000 + (251 * 12 + 17 * 5) % 12763)


@pytest.mark.parametrize("changed", ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"])
@pytest.mark.parametrize("variables", [SRUN, alone_on_host(SRUN)])
def test_another_job_step_or_restart_meets_elsewhere(variables, changed):
    one, other = place(variables), place(variables | {changed: "7"})
    assert one == place(variables)
    if isinstance(one, endpoints.PrivateFile):
        assert one.path != other.path
    else:
        assert one.port != other.port
        assert one.job != other.job


def test_the_port_of_a_step_is_never_an_ephemeral_one():
    for job in (1, 2**31, 2**40):
        assert 20000 <= place(SRUN | {"SLURM_JOB_ID": str(job)}).port < 32768


def test_tasks_of_one_host_meet_in_a_file_of_the_step():
    found = place(alone_on_host(SRUN))
    assert isinstance(found, endpoints.PrivateFile)
    assert found == place(alone_on_host(SRUN) | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"})


def test_ranks_of_horovodrun_meet_in_a_file_of_its_server():
    one_host = HOROVODRUN | SERVER | {"HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"}
    one_host |= {"HOROVOD_LOCAL_RANK": "3", "HOROVOD_LOCAL_SIZE": "4"}
    found = place(one_host)
    assert isinstance(found, endpoints.PrivateFile)
    assert found == place(one_host | {"HOROVOD_RANK": "1", "HOROVOD_LOCAL_RANK": "1"})
    assert found != place(one_host | {"HOROVOD_GLOO_RENDEZVOUS_PORT": "65359"})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (OPEN_MPI, r"4 ranks on several hosts \(2 on this one\).*MASTER_ADDR.*INSTEP_DIST_FILE"),
        (MPICH, r"4 ranks on several hosts \(2 on this one\).*MASTER_ADDR.*INSTEP_DIST_FILE"),
        (HOROVODRUN, "horovodrun started 4 ranks on several hosts .*Export MASTER_ADDR"),
        (JSRUN, "jsrun started 4 ranks on several hosts"),
        (OPEN_MPI | {"PBS_JOBID": "7.pbs", "PBS_NODEFILE": "/nowhere"}, "4 ranks on several hosts"),
    ],
)
def test_where_nobody_says_where_to_meet_the_error_says_what_to_do(variables, message):
    with pytest.raises(RendezvousError, match=message):
        place(variables)


def allocations(folder):
    """A job of two hosts, as each batch system tells its ranks of it."""
    listing = folder / "hosts"
    slurm_ = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[08-09]"}
    pbs = {"PBS_JOBID": "12.server", "PBS_NODEFILE": str(listing)}
    lsf = {"LSB_JOBID": "12", "LSB_DJOB_RANKFILE": str(listing)}
    return [
        ("node08", OPEN_MPI | slurm_),
        ("node08", OPEN_MPI | pbs),
        ("node08", MPICH | pbs),
        ("node08", OPEN_MPI | lsf),
        ("node08", MPICH | lsf),
        ("node09", JSRUN | lsf),  # the first one is where the batch script runs
    ]


@pytest.mark.parametrize("which", range(6))
def test_mpirun_and_jsrun_put_rank_0_on_the_first_host_of_the_allocation(tmp_path, which):
    (tmp_path / "hosts").write_text("node08\nnode09\n")
    host, variables = allocations(tmp_path)[which]
    found = place(variables)
    assert found.host == host
    assert 20000 <= found.port < 32768
    assert found == place(variables)
    (job,) = {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"} & variables.keys()
    other = place(variables | {job: "13"})
    assert (other.port, other.job) != (found.port, found.job)


def test_open_mpi_tells_its_ranks_where_mpirun_is():
    told = {
        "OMPI_MCA_orte_hnp_uri": "2349662208.0;tcp://10.77.0.1,192.168.7.1:38907",
        "OMPI_MCA_orte_local_daemon_uri": "2349662208.1;tcp://10.77.0.2:48085",
    }
    assert place(OPEN_MPI | told).host == "10.77.0.1"
    other = told | {"OMPI_MCA_orte_hnp_uri": "2349662208.0;tcp://10.77.0.1:38908"}
    assert place(OPEN_MPI | told).port != place(OPEN_MPI | other).port
    rank0 = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(RendezvousError, match="several hosts"):  # mpirun started it elsewhere
        place(OPEN_MPI | rank0 | told)
    here = {"OMPI_MCA_orte_local_daemon_uri": told["OMPI_MCA_orte_hnp_uri"]}
    assert place(OPEN_MPI | rank0 | told | here) == place(OPEN_MPI | told)


def test_two_mpiruns_in_one_allocation_meet_at_different_ports(tmp_path):
    (tmp_path / "hosts").write_text("node08\nnode09\n")
    _, variables = allocations(tmp_path)[1]
    assert place(variables).port != place(variables | {"PMIX_NAMESPACE": "7"}).port


@pytest.mark.parametrize("variables", [OTHER_PMI, alone_on_host(SRUN)])
def test_the_file_that_the_user_names_comes_first(tmp_path, variables):
    named = {"INSTEP_DIST_FILE": str(tmp_path / "meet")}
    assert place(variables | named) == endpoints.PrivateFile(str(tmp_path / "meet"))
    assert place(OPEN_MPI | named) == endpoints.SharedFile(str(tmp_path / "meet"))
    assert place(SRUN | named) == endpoints.SharedFile(str(tmp_path / "meet"))


def test_a_node_list_that_is_none_or_missing_is_named():
    with pytest.raises(LaunchVariablesError, match=r"SLURM_STEP_NODELIST='node\[' is not a list"):
        place(SRUN | {"SLURM_STEP_NODELIST": "node["})
    with pytest.raises(LaunchVariablesError, match="but not SLURM_STEP_NODELIST"):
        place(without(SRUN, "SLURM_STEP_NODELIST"))


def meet(variables, seconds=0.05):
    with pytest.MonkeyPatch.context() as environ:
        for name, value in variables.items():
            environ.setenv(name, value)
        return stores.open_store(None, detect(variables), timedelta(seconds=seconds))


@pytest.mark.parametrize("rank", ["0", "2"])
def test_a_node_name_that_does_not_resolve_is_said_on_every_rank(rank):
    told = {"SLURM_STEP_NODELIST": "no-such-host.invalid", "SLURM_PROCID": rank}
    with pytest.raises(RendezvousError, match=r"'no-such-host.invalid' does not resolve.*Export"):
        meet(SRUN | told)


def test_a_port_of_the_step_that_is_taken_is_said():
    rank0 = SRUN | {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    for job in range(100):  # one of these ports is free
        variables = rank0 | {"SLURM_JOB_ID": str(job)}
        port = place(variables).port
        try:
            taken = socket.create_server(("127.0.0.1", port))
        except OSError:
            continue
        with taken, pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is in use"):
            meet(variables)
        return
    pytest.fail("no free port")


@pytest.mark.parametrize("given", ["MASTER_ADDR", "MASTER_PORT"])
def test_half_an_address_is_named(given):
    with pytest.raises(LaunchVariablesError, match=f"found {given}=1 but not MASTER_"):
        meet(SRUN | {given: "1"})


def test_ranks_that_never_come_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = (
        f"ranks 1, 2 of 3 did not come within 0 seconds; those that came: rank 0 on {gethostname()}"
    )
    with pytest.raises(RendezvousError, match=told):
        meet(alone_on_host(SRUN) | {"SLURM_PROCID": "0"})
    with pytest.raises(RendezvousError, match="rank 0 of 3 did not come within 0 seconds"):
        meet(alone_on_host(SRUN))
    assert list(tmp_path.iterdir()) == []


def test_a_note_of_a_killed_job_is_not_believed(tmp_path):
    path = str(tmp_path / "note")
    with socket.create_server(("127.0.0.1", 0)) as ended:
        port = ended.getsockname()[1]
        with port_file.publish(path, port):
            assert port_file.read(path)[:2] == ("127.0.0.1", port)
            ended.close()
            assert port_file.read(path) is None


def test_a_note_of_somebody_else_is_refused(tmp_path):
    path = tmp_path / "note"
    path.symlink_to("/etc/hostname")
    with pytest.raises(RendezvousError, match=r"cannot meet in the file .*Set TMPDIR"):
        port_file.read(str(path))


def test_a_note_that_cannot_be_written_is_said(tmp_path):
    path = tmp_path / "note"
    path.mkdir()
    with (
        pytest.raises(RendezvousError, match="cannot meet in the file"),
        port_file.publish(str(path), 1),
    ):
        pass
    assert list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------- python -m instep script.py

HERE = """
import json, os, sys
assert __name__ == "__main__"
print(json.dumps([sys.argv, sys.path[0], os.getcwd() in sys.path]))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("spelling", ["script", "module"])
def test_a_program_instead_of_a_command_is_run_in_this_process(tmp_path, spelling):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "here.py").write_text(HERE)
    command, where = {
        "script": (["folder/here.py"], tmp_path),
        "module": (["-m", "here"], folder),
    }[spelling]
    ran = subprocess.run(
        [sys.executable, "-m", "instep", *command, "7", "--", "-n", "x"],
        cwd=where, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 7, ran.stderr
    argv, path, has_cwd = json.loads(ran.stdout)
    assert argv[1:] == ["7", "--", "-n", "x"]
    assert argv[0].endswith("here.py")
    assert path == str(folder)
    assert has_cwd == (spelling == "module")
    program = " ".join(command)
    assert ran.stderr == (
        f"instep: no launcher's variables are set, so one process runs {program}. For several: "
        f"instep run -n 2 {program}\n"
    )


def test_the_only_rank_of_a_launcher_says_nothing_about_their_number(tmp_path):
    (tmp_path / "train.py").write_text("print('trained')")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "instep", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
        env=environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **alone),
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("trained\n", "")


def test_a_word_that_is_neither_a_command_nor_a_file_is_an_error_of_one_line(capsys):
    assert cli.main(["no-such-script.py"]) == 2
    assert capsys.readouterr().err == (
        "instep: no-such-script.py is no command of instep's, and there is no such script. "
        "See instep --help.\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("script", ["", "import instep; instep.init()"])
def test_a_rank_whose_peer_never_comes_ends_with_a_line_or_in_a_call_with_its_line(
    tmp_path, script
):
    (tmp_path / "train.py").write_text(script)
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "instep", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env=environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **alone)
        | {"INSTEP_TIMEOUT": "1"},
    )  # fmt: skip
    assert ran.returncode
    assert "rank 1 of 2 did not come within 1 seconds" in ran.stderr.splitlines()[-1]
    assert ("Traceback" in ran.stderr) == ('train.py", line 1' in ran.stderr) == bool(script)


# --------------------------------------------------------------------------------- the real ones

SCRIPT = """
import contextlib, json, os, sys
def listening():
    lines = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/net/{kind}")]
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread may close it
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes}
inherited = listening()  # MPICH's mpirun hands its own to each rank
import torch, instep
total = instep.all_reduce(torch.tensor(instep.rank + 1.0)).item()
world = instep.world
report = [world.rank, world.size, world.local_rank, world.local_size, world.node_rank,
          world.nodes, world.source, total, sorted(listening() - inherited)]
with open(f"{sys.argv[1]}{world.rank}", "w") as file:
    json.dump(report, file)
"""
OURS = ("INSTEP", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC", "GLOO",
        "OMPI_", "PMI", "MPI_", "SLURM_", "HOROVOD_", "JSM_")  # fmt: skip


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return kept | {"OMP_NUM_THREADS": "1", "INSTEP_TIMEOUT": "30", "INSTEP_DIVIDE": "always"} | more


MPI = [
    pytest.param(
        ["mpirun.openmpi", "--mca", "oob_tcp_if_include", "lo", "--oversubscribe", "--bind-to",
         "none", "-n"],
        "mpirun of Open MPI", id="Open MPI", marks=components.needs("Open MPI"),
    ),
    pytest.param(
        ["mpirun.mpich", "-n"],
        "mpirun of MPICH or Intel MPI", id="MPICH", marks=components.needs("MPICH"),
    ),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A script, a temporary folder of its own, and what Open MPI wants to run as root."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def environment_in(folder):
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    return environment(TMPDIR=str(folder / "tmp"), **root)


def bare(folder, name="rank"):
    return [sys.executable, str(folder / "script.py"), str(folder / name)]


def program(folder, name="rank"):
    return [sys.executable, "-m", "instep", *bare(folder, name)[1:]]


def reports(folder, size, name="rank"):
    found = [json.loads((folder / f"{name}{rank}").read_text()) for rank in range(size)]
    assert {report[7] for report in found} == {size * (size + 1) / 2}
    assert not [where for r in found for where in r[8] if not where.startswith("0100007F:")]
    return [World(*report[:7]) for report in found]


def notes(folder):
    return list((folder / "tmp").glob("instep-*"))


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.parametrize(
    ("mpirun", "source"),
    [MPI[0], pytest.param(*MPI[1].values, id="MPICH", marks=[*MPI[1].marks, pytest.mark.nightly])],
)
def test_ranks_of_mpirun_meet_again_and_again_through_shells_of_their_own(folder, mpirun, source):
    one, two = (" ".join(program(folder, name)) for name in ("one", "two"))
    command = [*mpirun, "2", "sh", "-c", f"{one} && {two}"]
    subprocess.run(command, env=environment_in(folder), check=True, timeout=50)
    for name in ("one", "two"):
        found = reports(folder, 2, name)
        assert found == [World(rank, 2, rank, 2, 0, 1, source) for rank in range(2)]
    assert notes(folder) == []


@pytest.mark.launch
def test_ranks_that_have_no_parent_in_common_meet_as_under_horovodrun(folder):
    """It starts each through a process and a shell of its own."""
    shells = [
        subprocess.Popen(
            ["sh", "-c", f'env HOROVOD_SIZE=2 HOROVOD_RANK={rank} "$@"; exit $?', "sh",
             *bare(folder)],
            env=environment_in(folder) | SERVER,
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [shell.wait(50) for shell in shells] == [0, 0]
    assert reports(folder, 2) == [World(r, 2, r, 2, 0, 1, "horovodrun") for r in range(2)]
    assert notes(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["1 / 0", "import instep; instep.init()"])
def test_an_error_of_a_program_in_this_process_shows_its_own_lines_only(tmp_path, failing):
    (tmp_path / "here.py").write_text(f"{failing}\n")
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    alone |= {"MASTER_PORT": str(free_port()), "INSTEP_TIMEOUT": "1"}
    environ = environment() | (alone if "init" in failing else {})
    ran = subprocess.run(
        [sys.executable, "-m", "instep", "here.py"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    places = [line for line in ran.stderr.splitlines() if line.startswith("  File ")]
    assert places == [f'  File "{tmp_path}/here.py", line 1, in <module>'], ran.stderr


PLACE = """
import sys
from instep.distributed.identity.launchers import detect, endpoint
world = detect()
with open(f"{sys.argv[1]}{world.rank}", "w") as file:
    file.write(f"{world.source}: {endpoint(world).path}")
"""


@pytest.mark.launch
@pytest.mark.parametrize(("mpirun", "source"), MPI)
def test_two_jobs_of_one_host_never_meet(folder, mpirun, source):
    (folder / "script.py").write_text(PLACE)

    def start(job):
        """Each has its session folder: Open MPI fails if two make one at once."""
        session = tempfile.mkdtemp(dir=folder)
        told = environment_in(folder) | {"OMPI_MCA_orte_tmpdir_base": session}
        return subprocess.Popen([*mpirun, "2", *bare(folder, job)], env=told)

    jobs = [start(job) for job in "ab"]
    assert [job.wait(50) for job in jobs] == [0, 0]
    a, b = ([(folder / f"{job}{rank}").read_text() for rank in range(2)] for job in "ab")
    assert a[0] == a[1] != b[0] == b[1]


WORLD = """
import sys
from instep.distributed.identity.launchers import detect, endpoint
world = detect()
with open(f"{sys.argv[1]}{world.rank}", "w") as file:
    print(repr(world), file=file)
    if world.size > 1:
        print(endpoint(world), file=file)
"""


def start_in(cluster, folder, *command):
    told = environment_in(folder) | cluster.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*command], env=told, check=True, timeout=50)


@pytest.mark.launch
@components.needs("Slurm")
def test_a_batch_script_is_a_world_of_one_and_its_srun_on_two_nodes_is_not(folder, cluster):
    """Without PyTorch: under srun ranks meet in test_same_under.py."""
    (folder / "script.py").write_text(WORLD)
    job, ended, output = folder / "job.sh", folder / "ended", folder / "output"
    alone, together = (" ".join(bare(folder, name)) for name in ("alone", "together"))
    lines = [f"trap 'echo $? > {ended}' EXIT", "set -e", alone, "export WORLD_SIZE=$SLURM_NTASKS"]
    job.write_text("\n".join(["#!/bin/sh", *lines, f"srun {together}", ""]))
    os.mkfifo(ended)  # sbatch --wait looks every ten seconds
    start_in(cluster, folder, "sbatch", "-Q", "-N2", "-n3", f"--output={output}", str(job))
    assert ended.read_text() == "0\n", output.read_text()
    worlds = [World(0, 3, 0, 2, 0, 2, "srun"), World(1, 3, 1, 2, 0, 2, "srun"),
              World(2, 3, 0, 1, 1, 2, "srun")]  # fmt: skip
    (alone,), *together = (
        (folder / name).read_text().splitlines()
        for name in ("alone0", "together0", "together1", "together2")
    )
    assert alone == repr(World())
    assert [world for world, _ in together] == [*map(repr, worlds)]
    assert len({where for _, where in together}) == 1


@pytest.mark.launch
@components.needs("Slurm")
@pytest.mark.parametrize(("mpirun", "source"), MPI)
def test_mpirun_in_an_allocation_is_believed_before_slurm(folder, cluster, mpirun, source):
    (folder / "script.py").write_text(PLACE)
    start_in(cluster, folder, "salloc", "-Q", "-N1", "-n2", *mpirun, "2", *bare(folder))
    told = [(folder / f"rank{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert told[0].startswith(f"{source}: ")
