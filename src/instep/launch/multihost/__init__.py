"""One job on several hosts: supervisors meet, agree on the job, and exchange its outcome."""
