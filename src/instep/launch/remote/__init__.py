"""`--hosts a:4,b:4`: one job on several hosts, started from one of them, or another one, by ssh.

Begin with `remote_job`, which starts an `agent` on each host and waits for all; an agent is the
supervisor of its host. `host_slots` reads which hosts there are.
"""
