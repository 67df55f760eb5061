"""The cluster examples: they parse, their commands are ours, and Slurm's job requeues on 75."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from simpro_fast.cli.train import parse_arguments
from simpro_fast.config import Config, load_config
from tests.conftest import ROOT
from tests.processes import PATIENCE

CLUSTER = ROOT / "launch" / "cluster"
ARGUMENTS = ["--config", "cifar10_lt/reversed", "data.root=/data", "output_dir=/shared/runs"]

# Two tasks of one node, or one for the warm-up; the worst exit code, as srun has it.
SRUN = """#!/bin/bash
tasks=2
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && tasks=${1#*=}; shift; done
worst=0
for ((n = 0; n < tasks; n++)); do
    SLURM_PROCID=$n SLURM_LOCALID=$n "$@"; code=$?
    ((code > worst)) && worst=$code
done
exit $worst
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then printf 'node-a\\nnode-b\\n'; else echo "$@" >> requeued; fi
"""
PYTHON = """#!/bin/bash
echo "RANK=${RANK-none} LOCAL_RANK=${LOCAL_RANK-none} WORLD_SIZE=${WORLD_SIZE-none} \
LOCAL_WORLD_SIZE=${LOCAL_WORLD_SIZE-none} MASTER=$MASTER_ADDR:$MASTER_PORT \
CACHE=$TRITON_CACHE_DIR | $@" >> calls
[[ "$*" == *--dry-run* ]] || exit $CODE
"""


def _read(words: list[str]) -> Config:
    """The configuration of a train.py command; unknown flags and keys raise."""
    (script,) = [word for word in words if word.endswith("launch/train.py")]
    options = parse_arguments(words[words.index(script) + 1 :])
    return load_config(options.config, options.overrides)


def _run_slurm(folder: Path, code: int) -> tuple[int, list[tuple[str, list[str]]]]:
    """Exit code of the job, and (environment, command) of every process it started."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (folder / "launch").symlink_to(ROOT / "launch")
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CODE": str(code),
        "TMPDIR": str(folder),
        "SLURM_JOB_ID": "40007",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    command = ["bash", "launch/cluster/slurm.sbatch", *ARGUMENTS]
    done = subprocess.run(
        command, cwd=folder, env=environment, timeout=PATIENCE, capture_output=True
    )
    calls = [line.split(" | ") for line in (folder / "calls").read_text().splitlines()]
    return done.returncode, [(where, command.split()) for where, command in calls]


def test_slurm_job_warms_each_node_then_starts_the_ranks(tmp_path: Path) -> None:
    code, (warm, *ranks) = _run_slurm(tmp_path, 0)
    assert code == 0 and not (tmp_path / "requeued").exists()
    assert warm[0].startswith("RANK=none") and "--dry-run" in warm[1]
    assert _read(warm[1]).distributed.expect_world_size is None
    assert len(ranks) == 2
    for number, (where, command) in enumerate(ranks):
        assert f"RANK={number} LOCAL_RANK={number} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2" in where
        assert "MASTER=node-a:20007" in where
        assert f"CACHE={tmp_path}/simpro-40007/triton" in where
        config = _read(command)
        assert config.distributed.expect_world_size == 2
        assert str(config.output_dir) == "/shared/runs"


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (1, False), (2, False)])
def test_slurm_job_requeues_when_preempted_only(tmp_path: Path, code: int, requeued: bool) -> None:
    found, _ = _run_slurm(tmp_path, code)
    assert found == code
    assert (tmp_path / "requeued").exists() is requeued
    if requeued:
        assert (tmp_path / "requeued").read_text().split() == ["requeue", "40007"]


def test_slurm_signals_the_ranks() -> None:
    text = (CLUSTER / "slurm.sbatch").read_text()
    assert re.findall(r"--signal=USR1@\d+", text)
    assert "--signal=B:" not in text, "the batch shell would get the signal, and the ranks nothing"


def test_the_host_file_has_as_many_slots_as_its_command_expects() -> None:
    text = (CLUSTER / "hostfile").read_text()
    slots = re.findall(r"^[\w.-]+ slots=(\d+)$", text, flags=re.MULTILINE)
    command = " ".join(line.strip("# \\") for line in text.splitlines() if line.startswith("#   "))
    config = _read(command.split())
    assert config.distributed.expect_world_size == sum(map(int, slots)) > 0


def test_kubernetes_job_is_consistent() -> None:
    runtime, job, policy = yaml.safe_load_all((CLUSTER / "kubeflow.yaml").read_text())
    for document in (runtime, job):
        assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    config = _read(trainer["command"])
    gpus = trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert config.distributed.expect_world_size == trainer["numNodes"] * gpus
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 30  # the default, short for a step and a save
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert str(config.output_dir) == mounts["runs"]
    assert str(config.data.root).startswith(mounts["data"])
    labels = policy["spec"]["podSelector"]["matchLabels"]
    assert labels["jobset.sigs.k8s.io/jobset-name"] == job["metadata"]["name"]
