"""Crash exploration: an operation's writes are recorded, and recovery is checked from every state a crash may leave.

`record` sees a real operation's calls; `model` says which of them a crash may lose, tear or reorder; `states` enumerates
what can be on the disk; `explore` puts each state there, runs the recovery, and cuts a failure down to its least sequence;
`scenarios` are ckptkit's own operations.
"""
