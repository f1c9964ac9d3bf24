"""The supervisor: it watches a training run, ends what hangs or goes wrong, and starts it again from the right step.

Processes are started and met by torchrun's own elastic agent; here is only what it lacks: heartbeats, what a loss or a digest
says, where the run can go on, policies, and an incident log.
"""
