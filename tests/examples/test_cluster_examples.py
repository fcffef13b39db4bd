"""The examples for Slurm and Kubernetes: what the scripts decide; the manifests are valid."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# `srun … holdfast screen` ends as CODES says for its node; `srun … holdfast run` prints its nodes.
SRUN = """#!/bin/bash
for word in "$@"; do
    case $word in --nodelist=*) node=${word#--nodelist=} ;; esac
done
case "$*" in
    *" smp") echo "keeps snapshots on $node" ;;
    *" screen "*) case "$node" in n1) exit "$CODE_OF_N1" ;; esac ;;
    *) echo "trains on $node: $*"
        [ "$(ls -A steps 2> /dev/null | wc -l)" -ge "${LOST_STEPS:-0}" ] && exit 0
        mktemp -q -p steps > /dev/null
        exit 137 ;;
esac
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf "n0\\nn1\\nn2\\n"; else echo "$@" >> drained; fi
"""


def run(
    script: str, folder: Path, *arguments: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of examples/slurm with commands of ours in the place of Slurm's."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[0-2]"}
    environment |= {"SMP_START_S": "0"}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "SLURMD_NODENAME": "n1", **settings}
    command = ["bash", str(EXAMPLES / "slurm" / script), *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(("code", "nodes"), [("1", "n0,n2"), ("0", "n0,n1"), ("3", "n0,n1")])
def test_a_job_leaves_out_suspect_nodes_and_no_others(
    tmp_path: Path, code: str, nodes: str
) -> None:
    done = run("train.sbatch", tmp_path, "train.py", CODE_OF_N1=code)
    assert done.returncode == 0, done.stderr
    assert f"trains on {nodes}:" in done.stdout
    assert ("n1 is suspect" in done.stdout) == (code == "1")


@pytest.mark.parametrize(("lost", "code"), [("2", 0), ("9", 137)])
def test_a_lost_step_is_started_again_a_few_times(tmp_path: Path, lost: str, code: int) -> None:
    (tmp_path / "steps").mkdir()
    done = run("train.sbatch", tmp_path, "train.py", CODE_OF_N1="0", LOST_STEPS=lost)
    assert done.returncode == code
    assert done.stdout.count("trains on n0,n1:") == (3 if code == 0 else 4)
    assert "n0,n1" in (tmp_path / "smp-7.txt").read_text()


def test_a_job_with_too_few_good_nodes_ends(tmp_path: Path) -> None:
    done = run("train.sbatch", tmp_path, "train.py", CODE_OF_N1="1", TRAIN_NODES="3")
    assert done.returncode == 1
    assert "only 2 of the 3 nodes" in done.stderr
    assert "trains on" not in done.stdout


@pytest.mark.parametrize(
    ("verdict", "drains"), [("0", False), ("1", True), ("2", False), ("3", False)]
)
def test_the_prolog_drains_suspect_nodes_only(tmp_path: Path, verdict: str, drains: bool) -> None:
    command = tmp_path / "holdfast"
    command.write_text(f"#!/bin/bash\nexit {verdict}\n")
    command.chmod(0o755)
    done = run("prolog.sh", tmp_path, HOLDFAST=str(command), LOGS=str(tmp_path))
    assert done.returncode == int(drains)
    assert (tmp_path / "drained").exists() == drains


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("job.yaml", ["Service", "PersistentVolumeClaim", "Job"]), ("sidecar.yaml", ["Job"])],
)
def test_the_manifests_for_kubernetes_fit_its_schemas(name: str, kinds: list[str]) -> None:
    reason = "not installed, it takes 108 MB: pip install kubernetes-validate"
    kubernetes = pytest.importorskip("kubernetes_validate", reason=reason)
    yaml = pytest.importorskip("yaml", reason=reason)
    manifests = list(yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text()))
    assert [manifest["kind"] for manifest in manifests] == kinds
    for manifest in manifests:
        kubernetes.validate(manifest, "1.31", strict=True)
    manifests[-1]["spec"]["template"]["spec"]["containerz"] = []
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(manifests[-1], "1.31", strict=True)


def test_the_unit_for_systemd_is_one(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (EXAMPLES / "systemd" / "holdfast-smp@.service").read_text()
    for name, text in {
        "good": unit,
        "bad": unit.replace("Restart=always", "Restart=often"),
    }.items():
        path = tmp_path / f"holdfast-smp@{name}.service"
        path.write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", path],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ("Failed to parse" in done.stderr) == (name == "bad"), done.stderr
