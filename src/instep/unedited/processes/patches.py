"""The functions that start or control processes and are replaced, and why."""

from __future__ import annotations

import os
import subprocess

from instep.process.patching import Patch, patches
from instep.unedited.files.compiled_code import libraries
from instep.unedited.processes import children, own_end, popen

PROCESS_PATCHES: tuple[Patch, ...] = (
    *patches(
        "a command runs once, on rank 0, and all ranks get its results",
        (subprocess, "run call", children.run),
        (subprocess.Popen, "__init__", popen.init),
        (subprocess.Popen, "poll", popen.poll),
        (subprocess.Popen, "wait", popen.wait),
        (subprocess.Popen, "communicate", popen.communicate),
        (subprocess.Popen, "send_signal", popen.send_signal),
        (os, "system", children.system),
        (os, "spawnv spawnve spawnvp spawnvpe", children.spawn),
        (os, "posix_spawn posix_spawnp", children.posix_spawn),
        (os, "waitpid", children.waitpid),
        (os, "killpg", children.kill),
        ("pty", "spawn", children.spawn_at_terminal),
        (
            "asyncio.unix_events:_UnixSubprocessTransport",
            "_start",
            children.start_asyncio_command,
        ),
    ),
    *patches(
        "a rank that ends its process would end it before rank 0 has come so far",
        (os, "_exit", own_end.exit_now),
        (os, "abort", own_end.abort),
        (os, "kill", own_end.kill),
    ),
    *patches(
        "one process becomes another program, not one for each rank",
        (os, "execv execve", own_end.execute),
    ),
    *patches(
        "a spawned worker sees the files that its rank sees",
        ("multiprocessing.spawn", "get_preparation_data", children.spawn_data),
    ),
    *patches(
        "training processes that the script starts itself would start on every rank",
        ("torch.multiprocessing.spawn", "start_processes", children.start_processes),
        ("torch.multiprocessing", "start_processes", children.start_processes),
        (
            "accelerate.utils.launch",
            "prepare_simple_launcher_cmd_env prepare_multi_gpu_env prepare_deepspeed_cmd_env",
            children.launch,
        ),
        ("torch.distributed.launcher.api", "launch_agent", children.launch),
        ("torch.nn:Module", "share_memory", children.share_memory),
        ("multiprocessing.process:BaseProcess", "start", children.start),
    ),
    *patches(
        "one run is logged, not one for each rank",
        ("wandb", "init", libraries.init_run),
    ),
)
