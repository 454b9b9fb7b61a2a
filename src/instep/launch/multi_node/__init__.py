"""One job on several hosts: the rendezvous of its supervisors, and their messages."""
