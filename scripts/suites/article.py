"""The six scripts of tczhangzhi/pytorch-distributed, an epoch each, under the launchers it names.

On instep the launcher starts `python -m instep SCRIPT`, or `instep horovodrun`. SUITE_SOURCES is
the folder of the scripts, SUITE_SIDE the side. A script has passed if it ends well, and has written
its checkpoint.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy
from PIL import Image
from suites import HOROVOD, OURS, ROOT

sys.path.append(str(ROOT / "tests"))
IS_OURS = os.environ["SUITE_SIDE"] == OURS
SECONDS = 140.0
LAUNCH = ("-m", "torch.distributed.launch", "--nproc_per_node", "2")
OPTIONS = ("--epochs", "1", "-b", "4")


class ArticlesScripts(unittest.TestCase):
    """Two ranks, two GPUs that are CPUs (`cuda_stand_in`), sixteen images."""

    folder: Path

    def setUp(self) -> None:
        """Sixteen images, in the folders of two classes."""
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        pixels = numpy.random.default_rng(0).integers(0, 255, (16, 64, 64, 3), "uint8")
        for number, each in enumerate(pixels):
            path = self.folder / "data" / ("train", "val")[number // 8] / f"class{number % 2}"
            path.mkdir(parents=True, exist_ok=True)
            Image.fromarray(each).save(path / f"{number}.png")

    def start(self, *command: object, gpus: int = 2, **variables: str) -> None:
        """Run the command in a folder of its own, with the stand-in in all of its processes."""
        path = [str(Path(__file__).with_name("cuda_stand_in")), os.environ["PYTHONPATH"]]
        environ = {**os.environ, **variables, "PYTHONPATH": ":".join(path)}
        environ |= {"SUITE_GPUS": str(gpus), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*map(str, command), "--data", str(self.folder / "data"), *OPTIONS],
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert [*self.folder.glob("*checkpoint*.tar")], said

    def python(self, script: str, *launcher: object) -> list[object]:
        """The words that run the script, after the launcher's or by themselves."""
        words = [sys.executable, *launcher]
        if IS_OURS:
            words += ["-m", "instep"]
        return [*words, Path(os.environ["SUITE_SOURCES"], script)]

    def test_dataparallel(self) -> None:
        """`python dataparallel.py`; on instep `instep run -n 2`."""
        launcher = ("-m", "instep", "run", "-n", 2) if IS_OURS else ()
        script = Path(os.environ["SUITE_SOURCES"], "dataparallel.py")
        self.start(sys.executable, *launcher, script)

    def test_multiprocessing_distributed(self) -> None:
        """It spawns its ranks itself."""
        self.start(*self.python("multiprocessing_distributed.py"))

    def test_distributed(self) -> None:
        """torch.distributed.launch."""
        self.start(*self.python("distributed.py", *LAUNCH))

    def test_apex_distributed(self) -> None:
        """torch.distributed.launch."""
        self.start(*self.python("apex_distributed.py", *LAUNCH))

    def test_horovod_distributed(self) -> None:
        """horovodrun."""
        script = Path(os.environ["SUITE_SOURCES"], "horovod_distributed.py")
        if IS_OURS:
            launcher = [sys.executable, "-m", "instep", "horovodrun"]
        else:
            launcher = [Path(HOROVOD).with_name("horovodrun"), "--gloo"]
        python = sys.executable if IS_OURS else HOROVOD
        self.start(*launcher, "-np", 2, "-H", "localhost:2", python, script)

    def test_distributed_slurm_main(self) -> None:
        """srun, on two nodes of a Slurm of its own."""
        from slurm import Slurm

        cluster = Slurm(self.folder)
        self.addCleanup(cluster.stop)
        cluster.start()
        words = self.python("distributed_slurm_main.py")
        self.start(
            *("srun", "-N2", "-n2", *words, "--dist-file", self.folder / "meet"),
            gpus=1,
            **cluster.environ,
        )
