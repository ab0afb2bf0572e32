"""Several nodes by examples/slurm/launch.sh, on loopback, and the SLURM script around it with stand-ins for SLURM."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, children_of
from tests.train.runs import metrics, settings, write_config, write_rows

LAUNCH, SBATCH = ROOT / "examples" / "slurm" / "launch.sh", ROOT / "examples" / "slurm" / "train.sbatch"


def environment(**more: object) -> dict[str, str]:
    own = {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "LOCAL_ADDRESS": "127.0.0.1",
    }
    return os.environ | own | {name: str(value) for name, value in more.items()}


def wait_until(is_true: Callable[[], bool], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def tree(process: int) -> list[int]:
    """The process and all that it started, and so on."""
    found = [process]
    for parent in found:
        found += children_of(parent)
    return found


class TwoNodes:
    """A run on two "nodes" of one rank each; what they say goes to files."""

    def __init__(self, folder: Path, config: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.outputs = [folder / f"node-{node}.txt" for node in (0, 1)]
        self.nodes = []
        for node, path in enumerate(self.outputs):
            command = [LAUNCH, str(node), "2", f"127.0.0.1:{port}", "--config", config]
            with path.open("w") as output:
                env = environment(RANKS_PER_NODE=1, LOGS=folder / "logs")
                self.nodes.append(subprocess.Popen(command, env=env, stdout=output, stderr=output, cwd=folder))

    def said(self) -> str:
        return "\n".join(output.read_text() for output in self.outputs)

    def end(self) -> None:
        for node in self.nodes:
            for process in tree(node.pid) if node.poll() is None else []:
                os.kill(process, signal.SIGKILL)
            node.wait()


@pytest.fixture
def two_nodes(tmp_path: Path, model_folder: Path) -> Iterator[Callable[[], TwoNodes]]:
    write_rows(tmp_path / "rows.jsonl", 200)
    tree = settings(tmp_path, model_folder, tokens__train_steps=100_000, parallelism__timeout_seconds=20)
    config, started = write_config(tmp_path / "config.yaml", tree), []

    def start() -> TwoNodes:
        started.append(TwoNodes(tmp_path, config))
        return started[-1]

    yield start
    for nodes in started:
        nodes.end()


@pytest.mark.nightly
def test_nodes_end_together_when_one_is_asked_to_and_when_one_dies(
    two_nodes: Callable[[], TwoNodes], tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "run"

    def has_trained(num_steps: int) -> bool:
        return (run / "metrics.jsonl").exists() and len(metrics(run)) >= num_steps

    nodes = two_nodes()
    wait_until(lambda: has_trained(3) or any(node.poll() is not None for node in nodes.nodes))
    for process in tree(nodes.nodes[1].pid):  # as SLURM sends it, to every process of a step
        os.kill(process, signal.SIGUSR1)
    assert [node.wait(60) for node in nodes.nodes] == [0, 0], nodes.said()
    assert json.loads((run / "result.json").read_text())["status"] == "preempted"
    saved = len(metrics(run))
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{saved}"]
    # Each rank has its own log, and the main one, on whichever node, reports for all.
    logs = [path.read_text() for path in sorted((tmp_path / "logs").rglob("stdout.log"))]
    assert len(logs) == 2
    assert sum(f"stopped    after step {saved}" in log for log in logs) == 1

    nodes = two_nodes()
    wait_until(lambda: has_trained(saved + 3) or any(node.poll() is not None for node in nodes.nodes))
    for process in tree(nodes.nodes[0].pid):
        os.kill(process, signal.SIGKILL)
    assert nodes.nodes[1].wait(60) == 1, nodes.said()


def test_torchrun_hands_on_a_configured_signal_and_the_run_is_saved(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 200)
    config = write_config(tmp_path / "config.yaml", settings(tmp_path, model_folder, tokens__train_steps=100_000))
    handled = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", handled]
    run, said = tmp_path / "runs" / "run", tmp_path / "said"
    with said.open("w") as output:
        process = subprocess.Popen(
            [*torchrun, "run_train.py", "--config", config],
            env=environment(),
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_until(lambda: process.poll() is not None or ((run / "metrics.jsonl").exists() and len(metrics(run)) >= 3))
        os.killpg(process.pid, signal.SIGUSR1)
        assert process.wait(60) == 1  # torchrun's own, whatever its ranks end with
    finally:
        process.kill()
    assert json.loads((run / "result.json").read_text())["status"] == "preempted", said.read_text()
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{len(metrics(run))}"]


def stand_in(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)


def test_the_slurm_script_starts_every_node_and_requeues_a_job_that_was_stopped(tmp_path: Path) -> None:
    commands, said = tmp_path / "bin", tmp_path / "said"
    stand_in(commands, "scontrol", f'[[ $1 == show ]] && echo node-a || echo "$@" >> {said}')
    # Signals go to the task, as srun's do.
    stand_in(
        commands,
        "srun",
        f'echo "$1" >> {said}; shift 2\nSLURM_NODEID=0 "$@" & task=$!\ntrap \'kill -USR1 $task\' USR1\n'
        "until wait $task; do status=$?; kill -0 $task 2>/dev/null || exit $status; done",
    )
    # torchrun with one rank, which ends well when it is asked to.
    stand_in(
        commands,
        "torchrun-like",
        f'echo "$@" >> {said}\nbash -c "trap \'echo saved >> {said}; exit 0\' TERM; touch {tmp_path}/up; '
        'while true; do sleep 0.1; done" & wait $!',
    )
    env = environment(PYTHON=commands / "torchrun-like", PATH=f"{commands}:{os.environ['PATH']}", LOGS=tmp_path)
    env |= {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "20017", "SLURM_JOB_NUM_NODES": "2"}
    (given,) = re.findall(r"^#SBATCH --cpus-per-task=(\d+)$", SBATCH.read_text(), re.MULTILINE)
    env["SLURM_CPUS_PER_TASK"] = given
    job = subprocess.Popen(["bash", SBATCH, "--config", "sft.yaml"], env=env, cwd=ROOT)
    try:
        wait_until((tmp_path / "up").exists)
        os.kill(job.pid, signal.SIGUSR1)
        assert job.wait(30) == 0
    finally:
        for process in tree(job.pid):
            if process != job.pid or job.poll() is None:
                os.kill(process, signal.SIGKILL)
    cpus, started, saved, requeued = said.read_text().splitlines()
    assert cpus == f"--cpus-per-task={given}"  # since 22.05, srun does not take it from sbatch
    assert "--nnodes 2" in started
    assert "--rdzv-endpoint node-a:20017" in started
    assert "--rdzv-id 20017-0 --rdzv-conf is_host=1" in started
    assert started.endswith(f"{ROOT}/run_train.py --config sft.yaml")
    assert (saved, requeued) == ("saved", "requeue 20017")


@pytest.mark.parametrize("script", [LAUNCH, SBATCH], ids=lambda path: path.name)
def test_scripts_are_what_bash_can_read_and_say_how_to_use_them(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    ended = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--config FILE" in ended.stderr


@pytest.mark.parametrize(
    ("rank", "status"),
    [
        # It listens only after the signal; and it has ended before it, while torchrun waits for other nodes.
        ("sleep 1; trap 'echo saved; exit 0' TERM; while true; do sleep 0.1; done", 0),
        ("true", 7),
    ],
)
def test_a_signal_before_a_rank_listens_or_after_it_has_ended_changes_no_status(
    tmp_path: Path, rank: str, status: int
) -> None:
    (tmp_path / "rank").write_text(rank)
    stand_in(
        tmp_path,
        "torchrun-like",
        f"bash {tmp_path}/rank & rank=$!; touch {tmp_path}/up; wait $rank; sleep 2; exit {status}",
    )
    with (tmp_path / "said").open("w") as said:
        node = subprocess.Popen(
            [LAUNCH, "0", "1", "127.0.0.1:1", "--config", "sft.yaml"],
            env=environment(PYTHON=tmp_path / "torchrun-like", RANKS_PER_NODE=1),
            stdout=said,
        )
        wait_until((tmp_path / "up").exists)
        time.sleep(0.3)
        node.terminate()
        assert node.wait(30) == status
    assert ("saved" in (tmp_path / "said").read_text()) == ("saved" in rank)
