"""ImageNet under Slurm: srun starts one task per GPU.

sbatch slurm.sbatch                                                  see this file
srun -n 4 python slurm.py --data DATA                                meet at the first host
srun -n 4 python slurm.py --data DATA --meet file --folder SHARED    meet in a file

The world size and the rank are Slurm's own, SLURM_NTASKS and SLURM_PROCID: one task is one rank. No
rank is computed from a number of GPUs.
"""

import os
from pathlib import Path

import instep
from distributed import train_rank
from options import parser


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--meet", choices=("tcp", "file"), default="tcp")
    flags.add_argument("--folder", type=Path, default=Path.cwd(), help="for --meet file")
    args = flags.parse_args()
    if args.meet == "file":
        instep.init(f"file://{meeting_file(args.folder.resolve())}")
    else:
        instep.init()
    train_rank(args)


def meeting_file(folder: Path) -> Path:
    """A file name of this start of this step, so that no file of an earlier start is used again."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return folder / ".".join(["meeting", *(os.environ.get(name, "0") for name in names)])


if __name__ == "__main__":
    main()
